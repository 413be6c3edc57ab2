package apiclient

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"fleetd/internal/api"
)

// maxProblem bounds the part of an error answer that is read.
const maxProblem = 1 << 20

// Problem is an error answer of the API. Code is empty if something else than fleetd answered.
type Problem struct {
	api.Problem
	// Raw is the answer's body as received; it is JSON only if Code is set.
	Raw []byte
}

// Error is one line: the detail, or the title, every fault, the code.
func (p *Problem) Error() string {
	var text strings.Builder
	text.WriteString(cmp.Or(p.Detail, p.Title, http.StatusText(p.Status)))
	for i, fault := range p.Errors {
		text.WriteString([]string{": ", "; "}[min(i, 1)])
		text.WriteString(strings.TrimSpace(fault.Pointer + " " + fault.Detail))
	}
	switch {
	case p.Rule != "":
		fmt.Fprintf(&text, " (%s, rule %s)", p.Code, p.Rule)
	case p.Code != "":
		fmt.Fprintf(&text, " (%s)", p.Code)
	default:
		fmt.Fprintf(&text, " (HTTP %d)", p.Status)
	}
	return text.String()
}

// readProblem turns an error answer into a Problem, from any server: a reverse proxy in between answers with HTML.
func readProblem(resp *http.Response) *Problem {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxProblem)) // the beginning of one that broke off may say enough
	p := &Problem{Raw: body}
	if err := json.Unmarshal(body, &p.Problem); err != nil && p.Code == "" { // members of another type are left out
		p.Detail = cmp.Or(p.Detail, firstLine(body))
	}
	p.Status, p.Title = resp.StatusCode, cmp.Or(p.Title, http.StatusText(resp.StatusCode))
	return p
}

// firstLine shortens the body of an answer that is not a problem document; a line of HTML is of no use.
func firstLine(body []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(body)), "\n")
	if strings.HasPrefix(line, "<") || strings.HasPrefix(line, "{") || !utf8.ValidString(line) {
		return ""
	}
	if runes := []rune(line); len(runes) > 200 {
		line = string(runes[:200]) + "..."
	}
	return strings.TrimSpace(line)
}
