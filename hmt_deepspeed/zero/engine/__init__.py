"""The engine: which config asks for HMT, what is refused, what is measured."""
