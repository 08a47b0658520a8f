"""Catalogue files: what a row means, and every error of a broken file by line and column."""

from datetime import date
from decimal import Decimal

import pytest

from catalog.catalogue import BadCatalogue, Catalogue, load
from catalog.rows import ANY_COUNT, parse
from providers.base import Accelerator, MeterKind, Tier

GIB = 2**30
HEADER = "accelerator_type,capacity_type,accelerator_id,gpu_count,region,machine_usd"
H100 = Accelerator(type="H100", count=8)


def lines(*rows, header=HEADER):
    return "\n".join([header, *rows]) + "\n"


def loaded(tmp_path, text, *, adapter="acme") -> Catalogue:
    (tmp_path / f"{adapter}.csv").write_text(text)
    return load(tmp_path, adapters={adapter})


def errors(tmp_path, text, *, adapter="acme"):
    with pytest.raises(BadCatalogue) as caught:
        loaded(tmp_path, text, adapter=adapter)
    return [error.removeprefix(f"{tmp_path}/") for error in caught.value.errors]


def test_a_row_says_shape_accelerator_count_region_tier_price_date_and_source():
    header = f"{HEADER},aliases,cpu,memory_gib,disk_gib,updated,source"
    text = lines("H100,Spot,h100.8,8,r1,25.5,H100-80GB,96,1000.5,200,2026-11-02,a letter", header=header)

    (row,), problems = parse(text)

    assert problems == []
    assert (row.accelerator, row.shape, row.tier, row.regions) == (H100, "h100.8", Tier.SPOT, ("r1",))
    assert [(meter.kind, meter.quantity, meter.usd) for meter in row.meters] == [
        (MeterKind.MACHINE, Decimal(1), Decimal("25.5"))
    ]
    assert row.aliases == ("H100-80GB",)
    assert (row.cpu, row.memory_bytes, row.disk_bytes) == (Decimal(96), int(1000.5 * GIB), 200 * GIB)
    assert (row.updated, row.source, row.available) == (date(2026, 11, 2), "a letter", True)


def test_each_part_of_a_price_is_a_meter_of_its_own():
    header = "accelerator_type,capacity_type,gpu_count,cpu,gpu_usd,cpu_usd,memory_usd"

    (row,), _ = parse(lines("H100,OnDemand,8,4,3.95,0.14,0.02", header=header))

    assert {meter.kind.value: (meter.quantity, meter.usd) for meter in row.meters} == {
        "gpu": (Decimal(8), Decimal("3.95")),
        "cpu": (Decimal(4), Decimal("0.14")),
        "memory": (Decimal(0), Decimal("0.02")),  # the request's to say
    }


def test_a_price_that_nobody_knows_is_unknown_and_not_nothing():
    (row,), _ = parse(lines("H100,Spot,x,8,,?"))

    assert [meter.usd for meter in row.meters] == [None]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [("8", [8]), ("1-4", [1, 2, 3, 4]), ("1 2 4-5", [1, 2, 4, 5]), ("", [ANY_COUNT]), ("0", [ANY_COUNT])],
)
@pytest.mark.behaviour(28)
def test_counts_are_one_several_a_range_or_any(counts, expected):
    rows, _ = parse(lines(f"H100,Spot,x,{counts},,1"))

    assert [row.accelerator.count for row in rows] == expected


@pytest.mark.behaviour(359)
def test_comments_empty_lines_blanks_and_the_order_of_columns_do_not_matter():
    text = '# prices\n\n capacity_type , accelerator_type,machine_usd\n  # more\nSpot, H100 ,"2.5"\n\n'

    (row,), problems = parse(text)

    assert problems == []
    assert (row.line, row.shape, row.accelerator.type) == (5, "H100", "H100")


def test_a_file_as_other_versions_wrote_it_is_read():
    header = "accelerator_type,capacity_type,price_per_hour,available,accelerator_id,gpu_count,region,updated"
    aws, modal = "H100,OnDemand,55.04,true,p5.48xlarge,8,us-east-1,2026-08-01", "T4,Spot,0.59,true,,,,"

    rows, problems = parse(lines(aws, modal, header=header))

    assert problems == []
    priced = [(row.shape, row.meters[0].kind.value) for row in rows]
    assert priced == [("p5.48xlarge", "machine"), ("T4", "gpu")]


def test_a_machine_without_accelerator_has_a_row_of_its_own(tmp_path):
    cloud = loaded(tmp_path, lines(",OnDemand,cpu.4,,,0.2")).of("acme")

    assert [(row.accelerator, row.shape) for row in cloud.rows] == [(None, "cpu.4")]
    assert cloud.accelerators == frozenset()


BROKEN = {
    "tier": ("H100,spot,x,8,,1", "capacity_type: 'spot' is not one of Spot, OnDemand"),
    "no-tier": ("H100,,x,8,,1", "capacity_type: is empty"),
    "fraction": ("H100,Spot,x,0.5,,1", "gpu_count: '0.5' is not a count"),
    "negative": ("H100,Spot,x,-1,,1", "gpu_count: '-1' is not a count"),
    "backwards": ("H100,Spot,x,8-1,,1", "gpu_count: '8-1' must be between 1 and"),
    "free": ("H100,Spot,x,8,,0", "machine_usd: nothing costs 0 dollars"),
    "below-zero": ("H100,Spot,x,8,,-2", "machine_usd: '-2' is not dollars"),
    "exponent": ("H100,Spot,x,8,,1e3", "machine_usd: '1e3' is not dollars"),
    "nan": ("H100,Spot,x,8,,NaN", "machine_usd: 'NaN' is not dollars"),
    "no-price": ("H100,Spot,x,8,,", "price: none is given"),
    "type": ("H 100,Spot,x,8,,1", "accelerator_type: 'H 100' cannot be the value of a Pod's label"),
    "shape": (f"H100,Spot,{'x' * 254},8,,1", "is not an id of a cloud: at most 253 characters"),
    "fields": ("H100,Spot,x,8,1", "row: has 5 fields where the header has 6"),
    "no-shape": (",Spot,,,,1", "accelerator_id: is empty"),
    "count-alone": (",Spot,x,8,,1", "gpu_count: is given, and accelerator_type is empty"),
    "quote": ('H100,Spot,"x,8,,1', "row: cannot be read"),
}


@pytest.mark.behaviour(358)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_an_error_by_file_line_and_column(tmp_path, name):
    row, words = BROKEN[name]

    (error,) = errors(tmp_path, lines("A100,Spot,a,8,,1", row))

    assert error.startswith("acme.csv:3: ")
    assert words in error


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("available", "yes", "'yes' is not true or false"),
        ("updated", "yesterday", "'yesterday' is not a date"),
        ("cpu", "0", "'0' is not an amount above 0"),
        ("memory_gib", "1Gi", "'1Gi' is not an amount"),
        ("price_per_hour", "2", "is the whole price, and machine_usd is there too"),
    ],
)
def test_a_broken_optional_column_is_an_error_by_its_name(tmp_path, column, value, words):
    (error,) = errors(tmp_path, lines(f"A100,Spot,a,8,,1,{value}", header=f"{HEADER},{column}"))

    assert error.startswith(f"acme.csv:2: {column}: ")
    assert words in error


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            "accelerator_type,capacity_type,machine_used",
            "no such column; did you mean machine_usd?",
        ),
        ("accelerator_type,machine_usd", "capacity_type: this column is required"),
        ("accelerator_type,capacity_type", "header: no price"),
        (f"{HEADER},region", "region: is there twice"),
    ],
)
def test_a_broken_header_is_an_error_by_its_column(tmp_path, header, words):
    assert any(words in error for error in errors(tmp_path, header + "\n"))


def test_every_error_of_every_file_is_listed(tmp_path):
    (tmp_path / "other.csv").write_text(lines("H100,Spot,x,8,,1", "H100,x,x,0.5,,y"))
    (tmp_path / "acme.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "acmee.csv").write_text("")

    with pytest.raises(BadCatalogue) as caught:
        load(tmp_path, adapters={"acme", "other"})

    assert [error.removeprefix(f"{tmp_path}/").split(": ")[:2] for error in caught.value.errors] == [
        ["acmee.csv:1", "file name"],
        ["acme.csv:1", "file"],
        ["acmee.csv:1", "header"],
        ["other.csv:3", "capacity_type"],
        ["other.csv:3", "gpu_count"],
        ["other.csv:3", "machine_usd"],
    ]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(BadCatalogue, match=r"nowhere: cannot be listed"):
        load(tmp_path / "nowhere")


def test_two_rows_for_one_thing_are_an_error(tmp_path):
    (error,) = errors(tmp_path, lines("H100,Spot,x,8,r1,1", "h100,Spot,x,8,r1,2"))

    assert error == "acme.csv:3: row: says the same as line 2: x Spot in r1"


@pytest.mark.behaviour(360)
def test_of_rows_for_a_region_a_group_and_everywhere_the_more_exact_one_is_believed(tmp_path):
    rows = lines("H100,Spot,x,8,,1", "H100,Spot,x,8,us,2", "H100,Spot,x,8,us-east-1,3")

    offers = loaded(tmp_path, rows, adapter="aws").of("aws").rows

    prices = {row.region: row.usd_per_hour for row in offers}
    assert (prices[""], prices["eu-west-1"]) == (Decimal(1), Decimal(1))
    assert (prices["us-west-1"], prices["us-east-1"]) == (Decimal(2), Decimal(3))


def test_one_name_for_two_accelerators_is_an_error(tmp_path):
    header = f"{HEADER},aliases"

    found = errors(tmp_path, lines("H100,Spot,a,8,,1,big", "H200,Spot,b,8,,1,BIG h100", header=header))

    assert found == [
        "acme.csv:3: aliases: 'BIG' already means H100",
        "acme.csv:3: aliases: 'h100' already means H100",
    ]


@pytest.mark.behaviour(26)
def test_a_row_that_is_not_available_is_never_offered_also_where_a_wider_row_says_it_is(tmp_path):
    rows = ("H100,Spot,x,8,,1,true", "H100,Spot,x,8,us,1,false", "T4,Spot,t,1,,1,false")

    cloud = loaded(tmp_path, lines(*rows, header=f"{HEADER},available"), adapter="aws").of("aws")

    assert not any(row.region.startswith("us-") or row.shape == "t" for row in cloud.rows)
    assert any(row.region == "eu-west-1" for row in cloud.rows)
    assert "T4" in cloud.accelerators  # known all the same


@pytest.mark.behaviour(357)
def test_a_file_of_the_folder_takes_the_place_of_ours_and_the_others_stay(tmp_path):
    catalogue = loaded(tmp_path, lines("H100,Spot,mine,8,,1"), adapter="modal")

    assert {row.shape for row in catalogue.of("modal").rows} == {"mine"}
    assert catalogue.of("aws") == load().of("aws")


def test_the_catalogue_that_comes_with_nebula_has_a_date_and_a_source_for_each_row():
    import catalog.catalogue as shipped

    for file in shipped._shipped():
        rows, problems = parse(file.read_text(encoding="utf-8"))

        assert rows
        assert problems == []
        assert all(row.updated and row.source for row in rows)


@pytest.mark.parametrize(
    ("adapter", "kind", "count", "shape", "price"),
    [
        ("aws", "h100", 8, "p5.48xlarge", "55.04"),
        ("aws", "T4", 1, "g4dn.xlarge", "0.526"),
        ("modal", "H100", 4, "H100!", "15.80"),
    ],
)
def test_the_catalogue_that_comes_with_nebula_knows_what_it_knew(adapter, kind, count, shape, price):
    rows = [
        row
        for row in load().of(adapter).rows
        if row.accelerator.key == f"{kind.lower()}:{count}" and row.region in ("", "us-east-1")
    ]

    assert rows[0].shape == shape
    assert rows[0].usd_per_hour == Decimal(price)
