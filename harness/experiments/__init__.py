"""The kinds of run, one a module, found by name (`harness.settings.experiment.find`). Each is light to import."""
