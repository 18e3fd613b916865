"""`zstore tune`: finds the fastest config by the plan and by short runs."""
