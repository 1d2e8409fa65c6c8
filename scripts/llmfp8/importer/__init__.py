"""Tables and readers of scripts/import_config."""
