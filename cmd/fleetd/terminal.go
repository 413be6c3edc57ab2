package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"

	"golang.org/x/text/width"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

// safeJSON escapes the characters that a terminal obeys or does not show, and that JSON allows bare. They can only be inside
// strings, so the document stays the same document.
func safeJSON(document []byte) []byte {
	var out bytes.Buffer
	for _, r := range string(document) {
		if r == '\r' || !cleantext.IsUnclean(r) {
			out.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&out, `\u%04x`, unit)
		}
	}
	return out.Bytes()
}

// printJSON writes a document as the server sent it, indented.
func printJSON(w io.Writer, document json.RawMessage) error {
	var out bytes.Buffer
	if err := json.Indent(&out, document, "", "  "); err != nil {
		return fmt.Errorf("the server's answer is not JSON: %w", err)
	}
	_, err := fmt.Fprintf(w, "%s\n", safeJSON(bytes.TrimSpace(out.Bytes())))
	return err
}

// printValue writes a value as an indented JSON document.
func printValue(w io.Writer, value any) error {
	document, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	return printJSON(w, document)
}

// printJSONLine writes a document as the server sent it, on one line.
func printJSONLine(w io.Writer, document json.RawMessage) error {
	var out bytes.Buffer
	if err := json.Compact(&out, document); err != nil {
		return fmt.Errorf("the server's answer is not JSON: %w", err)
	}
	_, err := fmt.Fprintf(w, "%s\n", safeJSON(out.Bytes()))
	return err
}

// printAnswer prints what is at a path: with --json as the server sent it, else by show.
func printAnswer[T any](ctx context.Context, a *app, c *apiclient.Client, asJSON bool, show func(T) error, query apiclient.Query, path ...string) error {
	return printSent(ctx, a, c, asJSON, show, apiclient.Request{Query: query, Path: path})
}

// printSent is printAnswer for any request.
func printSent[T any](ctx context.Context, a *app, c *apiclient.Client, asJSON bool, show func(T) error, r apiclient.Request) error {
	answer, err := apiclient.Send[apiclient.Answer[T]](ctx, c, r)
	switch {
	case err != nil:
		return err
	case asJSON:
		return printJSON(a.stdout, answer.Raw)
	}
	return show(answer.Value)
}

// first returns the first elements of a list; all of them if most is 0.
func first[T any](list iter.Seq2[T, error], most int) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		n := 0
		for item, err := range list {
			if !yield(item, err) {
				return
			}
			if n++; n == most {
				return
			}
		}
	}
}

// printList prints the list at a path: with --json each element as the server sent it, else a table of cells, or none if it is empty.
func printList[T any](ctx context.Context, a *app, w io.Writer, c *apiclient.Client, flags listFlags, head []string, none string, cells func(T) []string, query apiclient.Query, path ...string) error {
	rows := [][]string{head}
	for item, err := range first(apiclient.List[apiclient.Answer[T]](ctx, c, query, path...), flags.Limit) {
		if err == nil && flags.JSON {
			err = printJSONLine(w, item.Raw)
		}
		if err != nil {
			return err
		}
		if !flags.JSON {
			rows = append(rows, cells(item.Value))
		}
	}
	switch {
	case flags.JSON:
		return nil
	case len(rows) == 1 && none != "":
		_, err := fmt.Fprintln(w, none)
		return err
	}
	return a.table(w, "", rows)
}

// narrowest is how far a column is cut on a narrow terminal, in cells of the terminal.
const narrowest = 6

// table writes a list in aligned columns, each row after the indent. On a terminal, the widest columns are cut until a
// row fits into its width.
func (a *app) table(w io.Writer, indent string, rows [][]string) error {
	return aligned(w, indent, rows, a.columns)
}

// aligned writes rows in aligned columns; columns above zero is how many characters a line may have.
func aligned(w io.Writer, indent string, rows [][]string, columns int) error {
	var widths []int
	for _, row := range rows {
		last := len(row) - 1
		for last >= 0 && cleantext.Line(row[last]) == "" {
			last--
		}
		for i, cell := range row {
			row[i] = cleantext.Line(cell)
			if i == len(widths) {
				widths = append(widths, 0)
			}
			if i != last || columns > 0 { // what ends a line needs no column
				widths[i] = max(widths[i], cellWidth(row[i]))
			}
		}
	}
	if columns > 0 {
		fit(widths, columns-len(indent))
	}
	var out bytes.Buffer
	for _, row := range rows {
		line := indent
		for i, cell := range row {
			if columns > 0 {
				cell = cut(cell, widths[i])
			}
			line += cell + strings.Repeat(" ", max(0, widths[i]-cellWidth(cell))+len(gap))
		}
		out.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	_, err := w.Write(out.Bytes())
	return err
}

const gap = "  "

// fit takes cells from the widest column until all fit into a line of so many, or none can be cut further. The first
// column names the row, and stays.
func fit(widths []int, columns int) {
	total := -len(gap)
	for _, width := range widths {
		total += width + len(gap)
	}
	for ; total > columns && len(widths) > 1; total-- {
		widest := 1
		for i := 2; i < len(widths); i++ {
			if widths[i] > widths[widest] {
				widest = i
			}
		}
		if widths[widest] <= narrowest {
			return
		}
		widths[widest]--
	}
}

// cut shortens a cell to a width, with an ellipsis in place of what is left out.
func cut(cell string, to int) string {
	if cellWidth(cell) <= to {
		return cell
	}
	at := 0
	for i, r := range cell {
		if at += runeWidth(r); at > to-1 {
			return cell[:i] + "…"
		}
	}
	return cell
}

// cellWidth is how many cells of a terminal a text takes.
func cellWidth(text string) (cells int) {
	for _, r := range text {
		cells += runeWidth(r)
	}
	return cells
}

// runeWidth follows UAX #11: wide and fullwidth characters take two cells, marks on the one before none.
func runeWidth(r rune) int {
	if unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf) {
		return 0
	}
	if kind := width.LookupRune(r).Kind(); kind == width.EastAsianWide || kind == width.EastAsianFullwidth {
		return 2
	}
	return 1
}

// ago words a past moment: "now", "42s ago", "7m ago", "5h ago", "12d ago"; "-" for the zero time.
func ago(t, now time.Time) string {
	d := now.Sub(t)
	switch {
	case t.IsZero():
		return "-"
	case d < 2*time.Second:
		return "now"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds ago", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh ago", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd ago", int(d.Hours()/24))
	}
}

// utcText is a time as all tables and --since have it; empty for the zero time.
func utcText(t api.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

// timeCell is utcText, and "-" for the zero time.
func timeCell(t api.Time) string { return cmp.Or(utcText(t), "-") }

// timeText is a past moment with its age; "-" for the zero time.
func timeText(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339) + " (" + ago(t, now) + ")"
}
