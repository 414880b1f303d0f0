//! The pages that map behaviours to tests: complete, and about tests that are there.

use std::collections::BTreeMap;

use xtask::workspace_root;

/// The rows of `docs/cases.md`.
const CASES: &[&str] = &[
    "A1", "A3", "A5", "A7", "A10", "A11", "A13", "A15", "B1", "B3", "B5", "B7", "B9", "B11", "B13",
    "B15", "C1", "C4", "C6", "C8", "D1", "D3", "D6", "E1", "E3", "E5", "E7", "E9", "F1", "F3",
    "F5", "F7", "F9", "F11", "F13", "G1", "G3", "G5", "G7", "H1", "H3", "H5", "H7", "H9", "I1",
    "I3", "I5",
];

/// The numbers of the catalogue.
const NUMBERS: &[u32] = &[
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27,
    28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 39, 40, 42, 44, 45, 46, 48, 49, 50, 52, 53, 54, 55, 57,
    58, 59, 61, 62, 63, 64, 65, 67, 68, 69, 70, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 85,
    86, 87, 89, 90, 91, 92, 93, 94, 95, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108,
    109, 110, 111, 112, 114, 115, 116, 117, 119, 120, 121, 123, 124, 125, 126, 127, 128, 129, 130,
    131, 133, 135, 136,
];

/// What is wrong with a named test, if anything.
fn problem_of(named: &str) -> Option<String> {
    let Some((file, test)) = named.split_once("::") else {
        return Some(format!("{named:?} is not crate/file::test"));
    };
    let text = match std::fs::read_to_string(workspace_root().join("crates").join(file)) {
        Ok(text) => text,
        Err(e) => return Some(format!("{file}: {e}")),
    };
    let Some((before, _)) = text.split_once(&format!("fn {test}(")) else {
        return Some(format!("{file} has no test {test}"));
    };
    let above = before.lines().rev().map(str::trim).skip_while(|line| line.is_empty());
    let mut attributes = above.take_while(|line| line.starts_with("#["));
    match attributes.any(|line| line == "#[test]") {
        true => None,
        false => Some(format!("{file}: {test} is no test")),
    }
}

/// Checks a page of tables with a row for each of `wanted`.
fn check(page: &str, wanted: &[String]) {
    let text = std::fs::read_to_string(workspace_root().join(page)).unwrap();
    let mut rows: BTreeMap<String, &str> = BTreeMap::new();
    let mut problems = Vec::new();
    for line in text.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| #")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [row, what, shown] = cells[..] else {
            problems.push(format!("not three cells: {line}"));
            continue;
        };
        if rows.insert(row.to_owned(), shown).is_some() {
            problems.push(format!("{row} has two rows"));
        }
        if what.is_empty() || shown.is_empty() {
            problems.push(format!("{row} has an empty cell"));
        }
    }
    for row in wanted.iter().filter(|row| !rows.contains_key(*row)) {
        problems.push(format!("{row} has no row"));
    }
    for row in rows.keys().filter(|row| !wanted.contains(row)) {
        problems.push(format!("{row} is not in the catalogue"));
    }
    for (row, shown) in &rows {
        let why = shown.strip_prefix("n/a: ");
        if why.is_some_and(|why| why.len() < 5) {
            problems.push(format!("{row}: n/a without a reason"));
        }
        let named = shown.split(", ").filter(|_| why.is_none());
        problems.extend(named.filter_map(|n| problem_of(n.trim())).map(|p| format!("{row}: {p}")));
    }
    assert!(problems.is_empty(), "{page}:\n{}", problems.join("\n"));
}

#[test]
fn every_behaviour_has_a_row_and_every_named_test_exists() {
    let numbers: Vec<String> = NUMBERS.iter().map(u32::to_string).collect();
    check("docs/behaviours.md", &numbers);
}

#[test]
fn every_case_has_a_row_and_every_named_test_exists() {
    let cases: Vec<String> = CASES.iter().map(|case| case.to_string()).collect();
    check("docs/cases.md", &cases);
}

/// `docs/hostile-plugins.md`: every row has tests, all of which are there.
#[test]
fn every_row_about_hostile_plugins_names_tests_that_exist() {
    let text = std::fs::read_to_string(workspace_root().join("docs/hostile-plugins.md")).unwrap();
    let mut problems = Vec::new();
    let mut rows = 0;
    for line in text.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| given")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [given, expected, shown] = cells[..] else {
            problems.push(format!("not three cells: {line}"));
            continue;
        };
        rows += 1;
        if given.is_empty() || expected.is_empty() {
            problems.push(format!("an empty cell: {line}"));
        }
        match shown.strip_prefix("n/a: ") {
            Some(why) if why.len() < 5 => problems.push(format!("{given}: n/a without a reason")),
            Some(_) => {}
            None => {
                let named = shown.split(", ").filter_map(|n| problem_of(n.trim()));
                problems.extend(named.map(|p| format!("{given}: {p}")));
            }
        }
    }
    assert!(rows > 40, "{rows} rows");
    assert!(problems.is_empty(), "docs/hostile-plugins.md:\n{}", problems.join("\n"));
}
