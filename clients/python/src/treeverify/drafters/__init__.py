"""Drafters: things that guess how a token sequence goes on, as a tree.

Drafter is the whole interface; anything with such a draft() works with Session.generate. NgramDrafter looks up text,
TraceDrafter repeats a recorded text, MergedDrafter joins others, causal.py has drafters that are language models. onnx.py
and hf.py have those for ONNX files and for models of transformers; they need what not everybody has installed, so they
are imported by name: from treeverify.drafters.onnx import OnnxDrafter.
"""

from .causal import CausalDrafter
from .merged import MergedDrafter
from .ngram import NgramDrafter
from .protocol import Drafter
from .trace import TraceDrafter

__all__ = ["CausalDrafter", "Drafter", "MergedDrafter", "NgramDrafter", "TraceDrafter"]
