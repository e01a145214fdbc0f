//! Heat maps and histograms as SVG. Classes of the style sheet set the colours, so that both colour
//! schemes are readable.

use maud::{Markup, html};

use crate::record::HeatMap;

use super::numbers::{count, counted, significant};

/// Steps of the colour scale from 0 to the whole budget.
const STEPS: usize = 10;
/// Level of cells above the budget.
const OVER: usize = STEPS;
/// Level of cells whose error is NaN.
const UNDEFINED: usize = STEPS + 1;
/// Level of cells in which nothing was compared within a budget.
const PADDING: usize = STEPS + 2;

/// Fill patterns that the pictures refer to; they occur once on the page. Hatching and crosses
/// distinguish cells over the budget from dark cells under it without colour.
pub(super) fn patterns() -> Markup {
    html! {
        svg .patterns width="0" height="0" aria-hidden="true" {
            defs {
                pattern #over width="1" height="1" patternUnits="userSpaceOnUse" {
                    rect .over-ground width="1" height="1" {}
                    path .over-line d="M0 1L1 0" {}
                }
                pattern #undefined width="1" height="1" patternUnits="userSpaceOnUse" {
                    rect .undefined-ground width="1" height="1" {}
                    path .undefined-line d="M.2 .2L.8 .8M.2 .8L.8 .2" {}
                }
                (shares())
            }
        }
    }
}

/// The colour scale of the heat maps.
pub(super) fn legend() -> Markup {
    html! {
        div .legend aria-label="Colour scale of the heat maps" {
            span { "error ÷ budget:" }
            span { "0" }
            svg .scale width="200" height="14" viewBox="0 0 10 1" preserveAspectRatio="none" aria-hidden="true" {
                @for step in 0..STEPS {
                    path class=(format!("h{step}")) d=(format!("M{step} .5h1")) {}
                }
            }
            span { "1" }
            span { (key(OVER)) "over budget" }
            span { (key(UNDEFINED)) "NaN or infinite" }
            span { svg .key.hatched width="22" height="14" aria-hidden="true" {} "not compared within a budget: padding, special values" }
            span { span .mark-key aria-hidden="true" { "◂ ▴" } "row and column of the worst cell" }
        }
    }
}

fn key(level: usize) -> Markup {
    html! {
        svg .key width="22" height="14" viewBox="0 0 3 2" preserveAspectRatio="none" aria-hidden="true" {
            path class=(class(level)) d="M0 0h3v2h-3z" {}
        }
    }
}

/// A tensor's error over budget, row 0 at the top. `most` limits the rows and columns of the
/// picture; further cells are joined by their largest value. Marks next to the picture point to the
/// worst cell: inside it they would hide its neighbours.
pub(super) fn heat(map: &HeatMap, most: (usize, usize)) -> Markup {
    let whole = map.rows as usize * map.columns as usize;
    if whole == 0 || map.cells.len() != whole {
        return html! { p .note { "No heat map: the record holds " (count(map.cells.len() as u64)) " cells for " (map.rows) " × " (map.columns) "." } };
    }
    let HeatMap { rows, columns, cells, .. } = pooled(map, most);
    let (rows, columns) = (rows as usize, columns as usize);
    let levels: Vec<usize> = cells.iter().map(|cell| level(*cell)).collect();
    // The picture is hatched under the cells. Where some were not compared, no background may hide
    // that.
    let padded = levels.contains(&PADDING);
    let ground = (0..PADDING)
        .filter(|_| !padded)
        .max_by_key(|level| levels.iter().filter(|one| *one == level).count());
    let (worst, worst_value) = worst(&cells);
    let height = (rows * 6).clamp(36, 192);
    let title = format!(
        "Error over budget, {rows} × {columns} cells; the largest is {}",
        significant(worst_value, 3)
    );
    let middle =
        |place: usize, of: usize| format!("{:.1}%", 100.0 * (place as f64 + 0.5) / of as f64);
    let coarse = (map.total_rows, map.total_columns) != (rows as u64, columns as u64);
    html! {
        figure .heat {
            div .frame {
                span .down { span { "row 0" } span { (count(map.total_rows.saturating_sub(1))) } }
                div .map {
                    svg width="100%" height=(height) viewBox=(format!("0 0 {columns} {rows}")) preserveAspectRatio="none" role="img" {
                        title { (title) }
                        @if let Some(ground) = ground { path class=(class(ground)) d=(solid(0, 0, columns, rows)) {} }
                        @for level in (0..PADDING).filter(|level| Some(*level) != ground) {
                            @let runs = runs(&levels, columns, level);
                            @if !runs.is_empty() { path class=(class(level)) d=(outline(&runs)) {} }
                        }
                    }
                    span .mark-row style=(format!("top:{}", middle(worst / columns, rows))) aria-hidden="true" { "◂" }
                    span .mark-column style=(format!("left:{}", middle(worst % columns, columns))) aria-hidden="true" { "▴" }
                }
            }
            figcaption {
                "last axis 0 … " (count(map.total_columns.saturating_sub(1)))
                @if coarse { " · each cell the largest of several elements" }
            }
        }
    }
}

/// Joins cells so that at most `most` rows and columns remain, each by its largest value. NaN
/// survives the joining, and compared cells win over cells that were not.
pub(super) fn pooled(map: &HeatMap, most: (usize, usize)) -> HeatMap {
    let (rows, columns) = (map.rows as usize, map.columns as usize);
    if rows * columns == 0 || map.cells.len() != rows * columns {
        return map.clone();
    }
    let (down, across) = (rows.div_ceil(most.0.max(1)), columns.div_ceil(most.1.max(1)));
    let (fewer_rows, fewer_columns) = (rows.div_ceil(down), columns.div_ceil(across));
    let mut cells = vec![HeatMap::NOT_COMPARED; fewer_rows * fewer_columns];
    for (place, value) in map.cells.iter().enumerate() {
        let cell = &mut cells[place / columns / down * fewer_columns + place % columns / across];
        if value.is_nan() || *value > *cell {
            *cell = *value;
        }
    }
    HeatMap { rows: fewer_rows as u32, columns: fewer_columns as u32, cells, ..*map }
}

/// Where the largest cell is; NaN counts as the largest.
fn worst(cells: &[f32]) -> (usize, f64) {
    let place = (0..cells.len()).max_by(|a, b| {
        cells[*a].is_nan().cmp(&cells[*b].is_nan()).then(cells[*a].total_cmp(&cells[*b]))
    });
    place.map_or((0, f64::NAN), |place| (place, f64::from(cells[place])))
}

fn level(value: f32) -> usize {
    match value {
        value if !value.is_finite() => UNDEFINED,
        value if value < 0.0 => PADDING,
        value if value > 1.0 => OVER,
        value => ((value * STEPS as f32) as usize).min(STEPS - 1),
    }
}

fn class(level: usize) -> String {
    match level {
        OVER => "over".to_owned(),
        UNDEFINED => "undefined".to_owned(),
        level => format!("h{level} solid"),
    }
}

/// Horizontal runs of one level: row, first column, length.
fn runs(levels: &[usize], columns: usize, wanted: usize) -> Vec<(usize, usize, usize)> {
    let mut runs = Vec::new();
    for (row, levels) in levels.chunks(columns).enumerate() {
        let mut start = 0;
        for run in levels.chunk_by(|a, b| a == b) {
            if run[0] == wanted {
                runs.push((row, start, run.len()));
            }
            start += run.len();
        }
    }
    runs
}

/// All runs of one level as one path: far fewer bytes than a rectangle for each cell.
fn outline(runs: &[(usize, usize, usize)]) -> String {
    runs.iter().fold(String::new(), |mut path, (row, start, length)| {
        path.push_str(&solid(*start, *row, *length, 1));
        path
    })
}

fn solid(x: usize, y: usize, width: usize, height: usize) -> String {
    format!("M{x} {y}h{width}v{height}h-{width}z")
}

/// Width of one bar and the height of the tallest, in pixels.
const BAR: (usize, usize) = (20, 84);

/// The base line of the bars.
const BASE: usize = BAR.1 + 6;

/// Bars of a histogram.
const BARS: usize = 16;

/// What all histograms have in common; it occurs once on the page.
fn shares() -> Markup {
    html! {
        g #shares {
            path .axis d=(format!("M0 {BASE}H{}", BARS * BAR.0)) {}
            path .limit d=(format!("M{} 0V{BASE}", WITHIN * BAR.0)) {}
            @for (place, label) in [(0, "0"), (4, "½"), (WITHIN, "1 = budget"), (12, "1½")] {
                text x=(place * BAR.0) y=(BASE + 15) text-anchor="middle" { (label) }
            }
        }
    }
}

/// Elements by share of budget used, in bins of 1/8 including their upper ends: an element that
/// uses its whole budget is within it. Heights are logarithmic, because a few elements over their
/// budget must be visible next to millions under it. Those of the `compared` elements that have no
/// share, such as NaN, are in no bar and are counted next to it.
pub(super) fn histogram(bins: &[u64], compared: u64) -> Markup {
    if bins.iter().all(|bin| *bin == 0) {
        return html! { p .note { "No histogram of budget use was recorded." } };
    }
    let tallest = bins.iter().copied().max().unwrap_or(1);
    let over: u64 = bins.iter().skip(WITHIN).sum();
    let unbinned = compared.saturating_sub(bins.iter().sum());
    let (width, height) = (bins.len() * BAR.0 + 24, BASE + 20);
    html! {
        figure .histogram {
            svg viewBox=(format!("0 0 {width} {height}")) role="img" {
                title { (counts(bins)) }
                g transform="translate(12 0)" {
                    @for (class, from, bins) in [("bar", 0, &bins[..bins.len().min(WITHIN)]), ("bar-over", WITHIN, bins.get(WITHIN..).unwrap_or_default())] {
                        @if bins.iter().any(|bin| *bin > 0) { path class=(class) d=(bars(from, bins, tallest)) {} }
                    }
                    use href="#shares" {}
                }
            }
            figcaption {
                "Elements by share of budget, log scale to " (count(tallest)) ". "
                @if over > 0 { strong .fail-text { "✗ " (count(over)) " over budget." } } @else { "None of them over budget." }
                @if unbinned > 0 { " " strong { (counted(unbinned, "element")) " in no bar" } ": NaN, or special values that are compared exactly." }
            }
        }
    }
}

/// Bins of elements within their budget.
const WITHIN: usize = 8;

/// The counts as text: `up to 0.125: 12; up to 0.25: 3`.
fn counts(bins: &[u64]) -> String {
    let of = |(place, bin): (usize, &u64)| {
        let upper = if place + 1 < bins.len() {
            format!("up to {}", (place + 1) as f64 / 8.0)
        } else {
            format!("above {}", place as f64 / 8.0)
        };
        (*bin > 0).then(|| format!("{upper}: {}", count(*bin)))
    };
    bins.iter().enumerate().filter_map(of).collect::<Vec<_>>().join("; ")
}

/// Bars as one path.
fn bars(from: usize, bins: &[u64], tallest: u64) -> String {
    let mut path = String::new();
    for (place, &bin) in (from..).zip(bins).filter(|(_, bin)| **bin > 0) {
        let share = (1.0 + bin as f64).log10() / (1.0 + tallest as f64).log10();
        let height = ((share * BAR.1 as f64).round() as usize).max(2);
        path.push_str(&solid(place * BAR.0 + 1, BASE - height, BAR.0 - 2, height));
    }
    path
}
