"""One file per model family: what its config.json means. Registered in `model.checkpoint_config.FAMILY_MODULES`."""
