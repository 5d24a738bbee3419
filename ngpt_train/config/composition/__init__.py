"""From YAML files and the command line to a checked `Config`. Only this room knows Hydra and OmegaConf, and it imports
them when something is composed."""
