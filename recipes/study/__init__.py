"""Studies: many short training runs over configs and seeds,
from one YAML file to a folder of results."""
