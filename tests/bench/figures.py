"""What the benchmarks share in reading their options and summing up; owns no measurement."""


def numbers(text):
    """For argparse: "1,2,4" as integers."""
    return [int(number) for number in text.split(",")]


def share(values, part):
    """The value that `part` (0 to 1) of them are below."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]
