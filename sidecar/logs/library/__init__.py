"""The shipped log rules, as data: a YAML file per topic or framework, with its test lines."""
