package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// What devices say of themselves is printed to terminals, which obey control characters: everything from a device
// passes one of the three functions below.

// oneLine makes text safe for one line: control characters and white space become single spaces.
func oneLine(text string) string {
	return strings.Join(strings.Fields(replaceControls(text, " ")), " ")
}

// manyLines makes text safe but keeps its lines and tabs.
func manyLines(text string) string {
	lines := strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n")
	for i, line := range lines {
		cells := strings.Split(line, "\t")
		for j, cell := range cells {
			cells[j] = replaceControls(cell, "")
		}
		lines[i] = strings.Join(cells, "\t")
	}
	return strings.Join(lines, "\n")
}

func replaceControls(text, with string) string {
	var out strings.Builder
	for _, r := range strings.ToValidUTF8(text, "\uFFFD") {
		if isControl(r) {
			out.WriteString(with)
		} else {
			out.WriteRune(r)
		}
	}
	return out.String()
}

// isControl covers C0, DEL and C1 (0x9B starts a terminal sequence as ESC [ does), line separators, and the marks that
// reverse the direction of everything after them.
func isControl(r rune) bool {
	return unicode.IsControl(r) || r == 0x2028 || r == 0x2029 || (r >= 0x202A && r <= 0x202E) || (r >= 0x2066 && r <= 0x2069)
}

// safeJSON escapes the control characters that JSON allows bare. They can only be inside strings, so the document
// stays the same document.
func safeJSON(document []byte) []byte {
	var out bytes.Buffer
	for _, r := range string(document) {
		if r != '\n' && r != '\t' && r != '\r' && isControl(r) {
			fmt.Fprintf(&out, `\u%04x`, r)
		} else {
			out.WriteRune(r)
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

// printJSONLine writes a document as the server sent it, on one line.
func printJSONLine(w io.Writer, document json.RawMessage) error {
	var out bytes.Buffer
	if err := json.Compact(&out, document); err != nil {
		return fmt.Errorf("the server's answer is not JSON: %w", err)
	}
	_, err := fmt.Fprintf(w, "%s\n", safeJSON(out.Bytes()))
	return err
}

// table writes rows in aligned columns, each row after the indent.
func table(w io.Writer, indent string, rows [][]string) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = oneLine(cell)
		}
		// The writer pads a last cell only if a tab follows it.
		fmt.Fprintln(columns, indent+strings.TrimRight(strings.Join(cells, "\t"), "\t"))
	}
	return columns.Flush()
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

// timeText is a past moment with its age; "-" for the zero time.
func timeText(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339) + " (" + ago(t, now) + ")"
}
