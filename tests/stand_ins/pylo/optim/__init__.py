from .AdafacLO_naive import AdafacLO_naive

__all__ = ["AdafacLO_naive"]
