"""`zstore run`: starts a script's ranks on one machine or several."""
