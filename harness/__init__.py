"""The evaluation harness: settings, models, replay, measurements, records."""
