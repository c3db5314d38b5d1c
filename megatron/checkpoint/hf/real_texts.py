"""Texts on which tokenizers are compared: code and prose of this package, and the scripts and signs that it lacks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

COUNT = 1000
_SPECIAL = (
    "Der Fluß über die Brücke, naïve façade: señor, İstanbul, Ångström, œuvre.",
    "A\u0308 o\u0308 e\u0301 n\u0303: letters and marks in two characters each.",
    "中文和日本語の文章、「かな」もカタカナも。한국어 문장입니다.",
    "Привет, мир! Ёлка, ъезд. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم",
    "हिन्दी में एक वाक्य। ภาษาไทยไม่มีช่องว่าง Tiếng Việt có dấu.",
    "🙂👩‍👩‍👧‍👦 🇳🇴 ½ ① ﬁ ﬀ Ⅳ № ™ … — – ‘’ “”",
    "1234567890 3.14159 1,000,000 0xFF 1e-05 2026-11-24T16:30:00Z 192.168.0.1",
    "  leading, trailing  \n\n\n\ttabs\t\tand   runs    of     spaces      \r\nlines\rof all\r\nkinds\n ",
    "don't we'll I'M THEY'RE it's 'quoted' rock'n'roll",
    "def f(x):\n    return {k: v[::-1] for k, v in x.items() if v != ''}  # !@#$%^&*()_+-=[]{}|;:\\\"<>/?`~\n",
    "<b>mark</b> &amp; [link](https://example.org/a?b=c&d=%20) $x^2 + \\frac{1}{2}$",
    "\u00a0no-break\u2003em\u200bzero\ufeffmark\u3000wide",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "",
    " ",
    "\n",
)


@cache
def real_texts() -> tuple[str, ...]:
    """The same texts on every machine with the same version of this package."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(root.rglob("*.py"))
    paragraphs = [each for file in files for each in file.read_text(encoding="utf-8").split("\n\n") if each]
    wanted = COUNT - len(_SPECIAL)
    return (*_SPECIAL, *(paragraphs[number * len(paragraphs) // wanted] for number in range(wanted)))
