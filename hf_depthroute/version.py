"""The library's version, in a place that everything can import."""

__version__ = "0.1.0"
# To install from, as long as no index has the package.
REPOSITORY = "https://github.com/hf-depthroute/hf-depthroute"
