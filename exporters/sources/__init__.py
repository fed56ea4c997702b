"""Sources: each reads one system and returns `exporters.model` types; it computes nothing."""
