package apiclient

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"
)

// maxProblem bounds the part of an error answer that is read.
const maxProblem = 1 << 20

// Problem is an error answer of the API: problem details of RFC 9457 with fleetd's stable code.
type Problem struct {
	// Type is a URI of the kind of problem, "about:blank" or empty if there is none.
	Type string `json:"type"`
	// Title is the short text of the kind.
	Title string `json:"title"`
	// Status is the HTTP status.
	Status int `json:"status"`
	// Detail is the sentence for people.
	Detail string `json:"detail"`
	// Code is fleetd's stable name, such as "device_offline"; empty if something else than fleetd answered.
	Code string `json:"code"`
	// Extensions are all other members as received, such as "errors", "outcome" and "sent".
	Extensions map[string]json.RawMessage `json:"-"`
	// Raw is the answer's body as received; it is JSON only if Code is set.
	Raw []byte `json:"-"`
}

// Fault is one entry of a problem's "errors": a JSON pointer (RFC 6901) into the arguments, and what is wrong there.
type Fault struct {
	Pointer string `json:"pointer"`
	Detail  string `json:"detail"`
}

// Error is one line: the detail, or the title, every fault, the code.
func (p *Problem) Error() string {
	var text strings.Builder
	switch {
	case p.Detail != "":
		text.WriteString(p.Detail)
	case p.Title != "":
		text.WriteString(p.Title)
	default:
		text.WriteString(http.StatusText(p.Status))
	}
	for i, fault := range p.Faults() {
		text.WriteString([]string{": ", "; "}[min(i, 1)])
		text.WriteString(strings.TrimSpace(fault.Pointer + " " + fault.Detail))
	}
	switch rule := p.Rule(); {
	case rule != "":
		fmt.Fprintf(&text, " (%s, rule %s)", p.Code, rule)
	case p.Code != "":
		fmt.Fprintf(&text, " (%s)", p.Code)
	default:
		fmt.Fprintf(&text, " (HTTP %d)", p.Status)
	}
	return text.String()
}

// Faults returns the entries of "errors".
func (p *Problem) Faults() []Fault {
	var faults []Fault
	// A list of another shape has nothing to show; the detail is enough.
	_ = json.Unmarshal(p.Extensions["errors"], &faults)
	return faults
}

// Outcome returns "outcome": "unknown" if the device may have acted, else empty.
func (p *Problem) Outcome() string {
	var outcome string
	_ = json.Unmarshal(p.Extensions["outcome"], &outcome) // absent or of another type: no outcome
	return outcome
}

// Rule returns "rule": which rule refused, empty if none did.
func (p *Problem) Rule() string { return p.text("rule") }

// Call returns "call": the id of the call that failed, in the audit and in logs; empty if there was none.
func (p *Problem) Call() string { return p.text("call") }

// Confirmation returns "confirmation": what makes the same call pass once, with code "confirmation_required".
func (p *Problem) Confirmation() string { return p.text("confirmation") }

func (p *Problem) text(name string) (text string) {
	_ = json.Unmarshal(p.Extensions[name], &text) // absent or of another type: empty
	return text
}

// Sent returns "sent", whether bytes of the call left for the device; known is false if the answer does not say.
func (p *Problem) Sent() (sent, known bool) {
	err := json.Unmarshal(p.Extensions["sent"], &sent)
	return sent, err == nil
}

// UnmarshalJSON keeps the members it does not know.
func (p *Problem) UnmarshalJSON(data []byte) error {
	type plain Problem
	if err := json.Unmarshal(data, (*plain)(p)); err != nil {
		return err
	}
	if err := json.Unmarshal(data, &p.Extensions); err != nil {
		return err
	}
	for _, known := range []string{"type", "title", "status", "detail", "code"} {
		delete(p.Extensions, known)
	}
	return nil
}

// readProblem turns an error answer into a Problem, from any server: a reverse proxy in between answers with HTML.
func readProblem(resp *http.Response) *Problem {
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	p := &Problem{}
	if err != nil || json.Unmarshal(body, p) != nil {
		p = &Problem{Detail: firstLine(body)}
	}
	p.Status, p.Raw = resp.StatusCode, body
	if p.Title == "" {
		p.Title = http.StatusText(resp.StatusCode)
	}
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
