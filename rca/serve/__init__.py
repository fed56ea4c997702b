"""The incident server: takes Alertmanager's webhook, captures and explains each incident, and publishes the answer."""
