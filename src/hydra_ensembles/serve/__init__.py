"""From a saved ensemble to a service: named outputs, files for other runtimes, archives scored."""
