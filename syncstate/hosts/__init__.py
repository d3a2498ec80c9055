"""What the hosts are made of. Nothing here is public: the hosts are `syncstate.lightning` and its neighbours."""
