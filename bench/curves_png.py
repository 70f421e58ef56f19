"""Draws growth curves in the environment that has matplotlib.

Usage: curves_png.py FILE.png, with the figures as JSON on stdin.
"""

import json
import sys

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

given = json.load(sys.stdin)
picture, places = plt.subplots(1, len(given["figures"]), figsize=(15, 5), constrained_layout=True)
for place, (name, title) in zip(places, given["figures"].items(), strict=True):
    for one, points in given["series"].items():
        ours = one == "perdure"
        turns, values = [point["turns"] for point in points], [point[name] for point in points]
        place.loglog(turns, values, marker="o", linewidth=2.5 if ours else 1.2, label=one, zorder=3 if ours else 2)
    place.set(title=title, xlabel="turns in the run")
    place.grid(which="major", alpha=0.3)
picture.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small")
picture.savefig(sys.argv[1], dpi=110)
