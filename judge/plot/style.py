"""
How pictures look, and how they are written. Importing this module takes a second.
"""

import io
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from judge.files import write_file

# Colors that color-blind people can tell apart
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
plt.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "text.parse_math": False,  # a label may have two dollar signs
        "axes.titlesize": 11,
        "figure.figsize": (8, 4.2),
        "figure.constrained_layout.use": True,
        "savefig.dpi": 150,
    }
)


def save_figure(figure, path: Path) -> None:
    """Writes a PNG. The same data give the same bytes. Raises OSError."""
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    plt.close(figure)
    write_file(path, image.getvalue())
