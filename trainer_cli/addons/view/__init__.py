"""Runs in a browser: `train report`, which writes one HTML file, and `train serve`, a server that is live.

Both show the same sections, made of a `RunRecord` as `runs` reads it; the server asks again, and a run is read again
only after its files have changed. `report_at_end` writes the report of a run when its `fit` ends.

It promises:
- A page needs no network: it holds its data, its style, and the scripts that draw it.
- What of a run cannot be read is named on the page, and the rest is drawn.
- The server answers GET alone. No part of a request becomes a path, and a browser on another machine needs the token
  that is printed at the start.
- Nothing in a run's directory is written but `report.html`. A report that fails never fails the fit: it is a warning.

Begin with `report.py`, then `report_sections` for what is shown and `serve_runs` for what is read again. No other
package takes a name from this one: what the core asks for is a part in `addon.py`.
"""
