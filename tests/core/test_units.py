"""Quantities: text to numbers, numbers to text, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import InputError
from legato.core.quantities import parse_bandwidth, parse_bytes, parse_seconds
from legato.core.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("10Gbit", 10e9),
        ("0.5Gbit", 5e8),
        ("500 Mbit", 5e8),
        ("100kbit", 1e5),
        ("7bit", 7.0),
        ("1Tbit", 1e12),
        (" 25Gbps ", 25e9),
        ("25gb/s", None),  # bytes or bits? say which
        ("10Gbit/s", 10e9),
        ("10Gbitps", 10e9),
        ("1e3Mbit", 1e9),
        (".5Gbit", 5e8),
    ],
)
def test_bandwidths(text, bps):
    if bps is None:
        with pytest.raises(InputError):
            parse_bandwidth(text)
    else:
        assert parse_bandwidth(text) == bps


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30us", 30e-6),
        ("30µs", 30e-6),
        ("500ns", 500e-9),
        ("1.5ms", 1.5e-3),
        ("2s", 2.0),
        ("2 S", 2.0),
        ("0", 0.0),
        (" 0 ", 0.0),
        ("0s", 0.0),
        ("1e-3s", 1e-3),
    ],
)
def test_times(text, seconds):
    assert parse_seconds(text) == seconds


@given(st.decimals(0, 999, places=3), st.sampled_from([("us", -6), ("ms", -3), ("ns", -9), ("s", 0)]))
def test_a_time_is_the_float_that_is_written_in_seconds(number, unit):
    assert parse_seconds(f"{number}{unit[0]}") == float(f"{number}e{unit[1]}")


@given(st.decimals("0.001", 999, places=3), st.sampled_from([("kbit", 3), ("Mbps", 6), ("Gbit/s", 9), ("Tbit", 12)]))
def test_a_bandwidth_is_the_float_that_is_written_in_bits(number, unit):
    assert parse_bandwidth(f"{number}{unit[0]}") == float(f"{number}e{unit[1]}")


@given(st.integers(0, 2**70), st.sampled_from([("", 1), ("kB", 1000), ("MiB", 2**20), ("GiB", 2**30)]))
def test_a_size_is_exact(number, unit):
    """More bytes than a float tells apart, too."""
    assert parse_bytes(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("25MiB", 25 * 2**20),
        ("4kB", 4000),
        ("4KiB", 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("1.5MiB", 3 * 2**19),
        ("2GB", 2 * 10**9),
        ("2GiB", 2**31),
        ("1e3", 1000),
        ("0", 0),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes and isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    "text", ["", "fast", "10", "10 G bit", "-1Gbit", "1,5Gbit", "10MiB", "infGbit", "nanbit", "١Gbit"]
)
def test_what_is_no_bandwidth(text):
    with pytest.raises(InputError, match="is not a bandwidth like 10Gbit or 500Mbit"):
        parse_bandwidth(text)


def test_a_bandwidth_is_above_zero():
    with pytest.raises(InputError, match="'0Gbit' is not a bandwidth above zero"):
        parse_bandwidth("0Gbit")


@pytest.mark.parametrize("text", ["", "5", "us", "-1us", "1min", "1e400s", "5 u s", "5us!"])
def test_what_is_no_time(text):
    with pytest.raises(InputError, match=r"is not a time like 30us, 1\.5ms or 2s"):
        parse_seconds(text)


@pytest.mark.parametrize(("text", "why"), [("1.5B", "a whole number of bytes"), ("1bit", "a size"), ("-1", "a size")])
def test_what_is_no_size(text, why):
    with pytest.raises(InputError, match=f"'{text}' is not {why}"):
        parse_bytes(text)


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_one_clear_error(text):
    for parse in (parse_bandwidth, parse_seconds, parse_bytes):
        try:
            assert parse(text) >= 0
        except InputError as error:
            assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.2345, "1.23 s"),
        (123.0, "123 s"),
        (999.7, "1,000 s"),
        (86400.0, "86,400 s"),
        (-1500.0, "-1,500 s"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (0.0009996, "1 ms"),
        (30e-6, "30 us"),
        (1.4e-14, "0 s"),
        (12e-9, "12 ns"),
    ],
)
def test_formatted_times(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (97.5 * 2**20, "97.5 MiB"),
        (999.7 * 2**10, "1,000 KiB"),
        (1023 * 2**20, "1,023 MiB"),
        (3 * 2**40, "3,072 GiB"),
    ],
)
def test_formatted_sizes(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.floats(1e-9, 1e6))
def test_a_formatted_time_is_the_time_to_three_digits(seconds):
    assert parse_seconds(format_seconds(seconds).replace(",", "")) == pytest.approx(seconds, rel=5.1e-3)


@pytest.mark.parametrize("text", ["1e-300bit", "0.9bit", "1e7Tbit"])
def test_a_bandwidth_that_no_link_has(text):
    with pytest.raises(InputError, match="is not a bandwidth of 1bit to 1000000Tbit"):
        parse_bandwidth(text)


def test_a_time_that_nobody_waits():
    assert parse_seconds("1e9s") == 1e9
    with pytest.raises(InputError, match=r"'1e300s' is not a time of at most 1e\+09s"):
        parse_seconds("1e300s")
