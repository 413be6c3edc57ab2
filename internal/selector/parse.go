package selector

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"fleetd/internal/timespan"
)

// SyntaxError is a syntax error in a selector.
type SyntaxError struct {
	Text     string
	Offset   int    // of the error, in bytes
	Expected string // in words
	Found    string // in words
}

// Column returns the position of the error in characters, from 1.
func (e *SyntaxError) Column() int {
	return utf8.RuneCountInString(e.Text[:min(e.Offset, len(e.Text))]) + 1
}

// Error contains the position, and the text unless it is long.
func (e *SyntaxError) Error() string {
	const short = 80
	where := "selector"
	if len(e.Text) <= short {
		where += " " + strconv.Quote(e.Text)
	}
	return fmt.Sprintf("%s, column %d: expected %s, found %s", where, e.Column(), e.Expected, e.Found)
}

// Parse parses a selector. Empty text matches every device. Errors are *SyntaxError.
func Parse(text string) (Selector, error) {
	p := parser{text: text}
	if len(text) > MaxText {
		return Selector{}, &SyntaxError{text, MaxText, fmt.Sprintf("at most %d bytes", MaxText), fmt.Sprintf("%d bytes", len(text))}
	}
	for i, r := range text {
		if r == utf8.RuneError && !printable(text[i:], r) {
			return Selector{}, &SyntaxError{text, i, "UTF-8", fmt.Sprintf("the byte 0x%02x", text[i])}
		}
	}
	terms, err := p.terms()
	if err != nil {
		return Selector{}, err
	}
	s := newSelector(terms)
	if n := len(s.String()); n > MaxText { // device ids and escapes may get longer
		return Selector{}, &SyntaxError{text, len(text), fmt.Sprintf("at most %d bytes in canonical form", MaxText), fmt.Sprintf("%d bytes", n)}
	}
	return s, nil
}

type parser struct {
	text string
	at   int
}

// fail returns an error at the next character.
func (p *parser) fail(format string, args ...any) error {
	const shown = 20
	found := "the end"
	if rest := p.text[p.at:]; rest != "" {
		n := 0
		for n < len(rest) && n < shown && !delimiter(rest[n]) {
			n++
		}
		for n < len(rest) && !utf8.RuneStart(rest[n]) {
			n++
		}
		found = strconv.Quote(rest[:max(n, 1)]) // a delimiter is one byte
	}
	return &SyntaxError{p.text, p.at, fmt.Sprintf(format, args...), found}
}

func (p *parser) space() {
	p.at = len(p.text) - len(strings.TrimLeft(p.text[p.at:], " \t\r\n"))
}

// take skips the token if it is next.
func (p *parser) take(token string) bool {
	if !strings.HasPrefix(p.text[p.at:], token) {
		return false
	}
	p.at += len(token)
	return true
}

// word returns the next letters that may be a name, possibly none.
func (p *parser) word() string {
	from := p.at
	for p.at < len(p.text) && labelByte(p.text[p.at]) {
		p.at++
	}
	return p.text[from:p.at]
}

func labelByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
}

func (p *parser) terms() ([]Term, error) {
	p.space()
	if p.at == len(p.text) {
		return nil, nil
	}
	var terms []Term
	for {
		if len(terms) == MaxTerms {
			return nil, p.fail("at most %d terms", MaxTerms)
		}
		t, err := p.term()
		if err != nil {
			return nil, err
		}
		terms = append(terms, t.finish())
		p.space()
		if p.at == len(p.text) {
			return terms, nil
		}
		if !p.take(",") {
			switch {
			case t.Op == OpLacks:
				return nil, p.fail(`"," or the end after !%s`, t.name())
			case t.Op == OpHas:
				return nil, p.fail(`an operator (=, !=, in, not in), "," or the end after %s`, t.name())
			}
			return nil, p.fail(`"," or the end; a value with a space or one of ,()="\ is written in double quotes`)
		}
		p.space()
	}
}

func (p *parser) term() (t Term, err error) {
	lacks := p.take("!")
	p.space()
	if err := p.subject(&t); err != nil {
		return t, err
	}
	if t.Op = OpHas; lacks {
		t.Op = OpLacks
		return t, nil
	}
	end := p.at
	p.space()
	operator := p.at
	switch {
	case p.take("!="):
		t.Op = OpNotIn
	case p.take("<="):
		t.Op = OpLessEqual
	case p.take(">="):
		t.Op = OpGreaterEqual
	case p.take("<"):
		t.Op = OpLess
	case p.take(">"):
		t.Op = OpGreater
	case p.take("="):
		t.Op = OpIn
	default:
		if t.Op = p.listOp(); t.Op == OpHas {
			p.at = end
			return t, nil
		}
		if t.Field == FieldSeen {
			break // refused below
		}
		return t, p.list(&t)
	}
	switch {
	case t.Field == FieldSeen && t.Op != OpLess && t.Op != OpGreater:
		p.at = operator
		return t, p.fail("< or > after seen, such as seen>2h (last seen more than two hours ago)")
	case t.Field == FieldSeen:
		return t, p.age(&t)
	case t.Op == OpIn || t.Op == OpNotIn:
		return t, p.values(&t, 1)
	case t.Field == FieldFirmware:
		return t, p.version(&t)
	}
	p.at = operator
	return t, p.fail("one of =, !=, in, not in after %s; only firmware and seen are compared with < and >", t.name())
}

// subject parses the field or label of the term.
func (p *parser) subject(t *Term) error {
	from := p.at
	name := p.word()
	if name == "" {
		return p.fail("a field (%s) or a label", strings.Join(slices.DeleteFunc(slices.Clone(fieldNames[:]), func(n string) bool { return n == "label" }), ", "))
	}
	if name == "label" && p.take(".") {
		from = p.at
		name = p.word()
	} else if f, ok := fieldOf(name); ok {
		t.Field = f
		return nil
	}
	t.Field, t.Label = FieldLabel, name
	if !validLabel(name) {
		p.at = from
		return p.fail("a label of 1 to %d characters of A-Z, a-z, 0-9, _ and -", MaxLabel)
	}
	return nil
}

func validLabel(key string) bool {
	for i := range len(key) {
		if !labelByte(key[i]) {
			return false
		}
	}
	return key != "" && len(key) <= MaxLabel
}

// listOp parses `in`, `not in` or `notin`, which a list follows. OpHas: another word follows.
func (p *parser) listOp() Op {
	switch p.word() {
	case "in":
		return OpIn
	case "notin":
		return OpNotIn
	case "not":
		p.space()
		if p.word() == "in" {
			return OpNotIn
		}
	}
	return OpHas
}

func (p *parser) list(t *Term) error {
	p.space()
	if !p.take("(") {
		return p.fail(`"(" and a list of values`)
	}
	for {
		if err := p.values(t, MaxValues); err != nil {
			return err
		}
		p.space()
		if p.take(")") {
			return nil
		}
		if !p.take(",") {
			return p.fail(`"," or ")"; a value with a space or one of ,()="\ is written in double quotes`)
		}
	}
}

// values parses one more value.
func (p *parser) values(t *Term, limit int) error {
	p.space()
	if len(t.Values) == limit {
		return p.fail("at most %d values", limit)
	}
	from := p.at
	v, err := p.value()
	if err != nil {
		return err
	}
	var allowed []string
	switch t.Field {
	case FieldDevice:
		v.Text = normalID(v.Text)
		for i := range v.Parts {
			v.Parts[i] = lowerASCII(v.Parts[i])
		}
	case FieldState:
		allowed = []string{"online", "offline", "pending", "contested"}
	case FieldTransport:
		allowed = []string{"websocket", "mqtt"}
	}
	if allowed != nil && (v.Parts != nil || !slices.Contains(allowed, v.Text)) {
		p.at = from
		return p.fail("one of %s after %s", strings.Join(allowed, ", "), t.Field)
	}
	t.Values = append(t.Values, v)
	return nil
}

// value parses a value with or without quotes.
func (p *parser) value() (Value, error) {
	var parts []string // between stars
	from := p.at
	quoted := p.take(`"`)
	var part []byte
	for {
		if p.at == len(p.text) {
			if quoted {
				return Value{}, p.fail(`a closing "`)
			}
			break
		}
		c := p.text[p.at]
		if !quoted && (delimiter(c) || p.at == from && strings.IndexByte(operatorBytes, c) >= 0) {
			break
		}
		p.at++
		switch {
		case c == '*':
			parts = append(parts, string(part))
			part = part[:0]
		case quoted && c == '"':
			return newValue(append(parts, string(part))), nil
		case quoted && c == '\\':
			escaped, ok := p.escape()
			if !ok {
				p.at--
				return Value{}, p.fail(`\", \\, \* or \x and two hex digits`)
			}
			part = append(part, escaped)
		default:
			part = append(part, c)
		}
	}
	if p.at == from {
		return Value{}, p.fail(`a value; "" is the empty one, and one with a space or one of ,()="\ is written in double quotes`)
	}
	return newValue(append(parts, string(part))), nil
}

// escape parses the text after a backslash. It consumes nothing unless ok.
func (p *parser) escape() (c byte, ok bool) {
	rest := p.text[p.at:]
	if rest == "" {
		return 0, false
	}
	switch c = rest[0]; c {
	case '"', '\\', '*':
		p.at++
		return c, true
	case 'x':
		if len(rest) < 3 {
			return 0, false
		}
		n, err := strconv.ParseUint(rest[1:3], 16, 8)
		if err != nil {
			return 0, false
		}
		p.at += 3
		return byte(n), true
	}
	return 0, false
}

// newValue returns the value of the texts between stars.
func newValue(parts []string) Value {
	if len(parts) == 1 {
		return Value{Text: parts[0]}
	}
	last := len(parts) - 1
	kept := parts[:1]
	for _, part := range parts[1:last] {
		if part != "" { // ** is *
			kept = append(kept, part)
		}
	}
	return Value{Parts: append(kept, parts[last])}
}

func (p *parser) version(t *Term) error {
	p.space()
	from := p.at
	v, err := p.value()
	if err != nil {
		return err
	}
	if _, ok := VersionKey(v.Text); !ok || v.Parts != nil {
		p.at = from
		return p.fail("a version that the firmware can read, such as 2.4.2")
	}
	t.Version = v.Text
	return nil
}

func (p *parser) age(t *Term) error {
	p.space()
	from := p.at
	v, err := p.value()
	if err != nil {
		return err
	}
	var ok bool
	if t.Age, ok = parseAge(v.Text); !ok || v.Parts != nil {
		p.at = from
		return p.fail("a duration such as 90s, 2h30m or 7d")
	}
	return nil
}

// maxAge is the longest time that seen is compared with.
const maxAge = 36500 * 24 * time.Hour

// parseAge parses a duration that is not negative.
func parseAge(text string) (time.Duration, bool) {
	age, err := timespan.Parse(text)
	return age, err == nil && age >= 0 && age <= maxAge
}

// name returns the start of the term.
func (t *Term) name() string {
	if t.Field != FieldLabel {
		return t.Field.String()
	}
	switch _, field := fieldOf(t.Label); {
	case !validLabel(t.Label): // from a map; Parse refuses it
		return `label."` + string(appendQuoted(nil, t.Label)) + `"`
	case field:
		return "label." + t.Label
	}
	return t.Label
}

// finish sorts the values, and computes what derives from the term.
func (t Term) finish() Term {
	slices.SortFunc(t.Values, func(a, b Value) int { return a.compare(&b) })
	t.Values = slices.CompactFunc(t.Values, func(a, b Value) bool { return a.compare(&b) == 0 })
	b := []byte(t.name())
	switch t.Op {
	case OpHas:
	case OpLacks:
		b = append([]byte("!"), b...)
	case OpIn, OpNotIn:
		b = t.appendValues(b)
	default:
		b = append(b, opNames[t.Op]...)
		if t.Field == FieldSeen {
			b = append(b, timespan.Format(t.Age)...)
		} else {
			b = (&Value{Text: t.Version}).appendTo(b)
		}
	}
	t.text = string(b)
	if t.Field == FieldTool {
		values := t.Values
		t.tool = func(name string) bool { return matchAny(values, name) }
	}
	return t
}

func (t *Term) appendValues(b []byte) []byte {
	operators := [...]string{"=", " in ("}
	if t.Op == OpNotIn {
		operators = [...]string{"!=", " not in ("}
	}
	if len(t.Values) == 1 {
		return t.Values[0].appendTo(append(b, operators[0]...))
	}
	b = append(b, operators[1]...)
	for i := range t.Values {
		if i > 0 {
			b = append(b, ',')
		}
		b = t.Values[i].appendTo(b)
	}
	return append(b, ')')
}
