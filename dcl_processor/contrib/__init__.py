"""Integrations with other packages; each is an extra."""

#: Upper bounds of durations, in seconds. Libraries' defaults end at 10 s; handlers take minutes.
DURATIONS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)

#: Upper bounds of the age of a row, in seconds: a second to a week.
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0, 604_800.0)
