"""Readers that turn what users have (CSV, OTLP and Jaeger spans) into the tables of an incident bundle."""
