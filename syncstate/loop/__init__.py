"""What the engine is made of: plans, sources, syncs, and a run from its start to its end. Nothing here is public."""
