"""Puts syncstate's configs on Hydra's search path, so that installing the package is all that a project has to do."""

from importlib import import_module

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class SyncStateSearchPathPlugin(SearchPathPlugin):
    """Appends the folder, so that a project's own config of the same name comes first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it looks for any config."""
        search_path.append(provider="syncstate", path="pkg://syncstate.configs")
        # Hydra works on a copy of the config store, made right after this; a schema registered later is not found.
        import_module("syncstate.configs").register()
