// Package selector parses and evaluates `select`: the text that selects devices in lists, counts, jobs, events,
// export, API keys and policy.
//
//	room=lab, floor in (1,2), !retired, firmware<2.4.2, seen>2h
//
// Terms are separated by commas, and all of them must match:
//
//	room=lab          the value is lab; * stands for any run of characters
//	room!=lab         the value is not lab, or there is none
//	room in (a,b)     the value is one of these
//	room not in (a,b) the value is none of these, or there is none
//	room, !room       there is a value; there is none
//	firmware<2.4.2    also <=, > and >=, in the order of the firmware itself
//	seen>2h, seen<7d  last seen longer ago than that; more recently than that
//
// A name is one of the fields device, name, board, chip, firmware, elf,
// transport, state, node, reason, seen and tool, else a label; label.NAME is
// always a label. A value that is empty or contains a space or one of ,()="\
// is written in double quotes, in which \" \\ \* and \xNN are the character
// itself. A device without a value matches !=, `not in` and !NAME, and nothing
// else.
package selector

import (
	"slices"
	"strings"
	"time"
)

// Limits of Parse.
const (
	MaxText   = 4096 // bytes of a text, as written and in canonical form
	MaxTerms  = 32
	MaxValues = 200 // in one `in (...)`
	MaxLabel  = 63  // bytes of a label's key
)

// Field is the field of a term. Terms are ordered by it, so that cheap ones are evaluated first.
type Field uint8

// Fields.
const (
	FieldDevice    Field = iota // the device's id
	FieldLabel                  // a label, named by Term.Label
	FieldState                  // online, offline, pending or contested
	FieldTransport              // of the connection: websocket or mqtt
	FieldNode                   // that holds the connection
	FieldReason                 // why the device is offline
	FieldName
	FieldBoard
	FieldChip
	FieldFirmware
	FieldELF
	FieldSeen
	FieldTool // a tool's name
)

var fieldNames = [...]string{
	FieldDevice: "device", FieldLabel: "label", FieldState: "state", FieldTransport: "transport", FieldNode: "node", FieldReason: "reason",
	FieldName: "name", FieldBoard: "board", FieldChip: "chip", FieldFirmware: "firmware", FieldELF: "elf", FieldSeen: "seen", FieldTool: "tool",
}

// String returns the field's name.
func (f Field) String() string { return fieldNames[f] }

// fieldOf returns the field with this name. `label` is only a prefix.
func fieldOf(name string) (Field, bool) {
	i := slices.Index(fieldNames[:], name)
	if i < 0 || Field(i) == FieldLabel {
		return FieldLabel, false
	}
	return Field(i), true
}

// Op is the operator of a term.
type Op uint8

// Operators.
const (
	OpIn           Op = iota // one of Values matches: `=` with one value, else `in`
	OpNotIn                  // none of Values matches, or there is no value: `!=`, `not in`
	OpHas                    // there is a value
	OpLacks                  // there is no value
	OpLess                   // Version; or Age: seen more recently than that
	OpLessEqual              // Version
	OpGreater                // Version; or Age: seen longer ago than that
	OpGreaterEqual           // Version
)

var opNames = [...]string{OpLess: "<", OpLessEqual: "<=", OpGreater: ">", OpGreaterEqual: ">="}

// Term is one condition.
type Term struct {
	Field  Field
	Label  string // the label's key; empty for other fields
	Op     Op
	Values []Value // of OpIn and OpNotIn, sorted, without duplicates

	Version string        // in comparisons of the firmware; the firmware can parse it
	Age     time.Duration // in comparisons of seen
	from    time.Time     // see Cutoff

	text string                 // canonical
	tool func(name string) bool // whether one of Values matches, for FieldTool
}

// String returns the term's canonical text.
func (t Term) String() string { return t.text }

// Selector matches devices. The zero value matches every device. It is immutable; copies share its terms.
type Selector struct{ terms []Term }

// newSelector sorts the terms and drops duplicates. It keeps the slice.
func newSelector(terms []Term) Selector {
	if len(terms) == 0 {
		return Selector{}
	}
	slices.SortFunc(terms, func(a, b Term) int {
		if a.Field != b.Field {
			return int(a.Field) - int(b.Field)
		}
		if c := strings.Compare(a.Label, b.Label); c != 0 {
			return c
		}
		return strings.Compare(a.text, b.text)
	})
	return Selector{slices.CompactFunc(terms, func(a, b Term) bool { return a.text == b.text })}
}

// FromMap returns a selector of the devices with all of these labels; the name `device` means the device's id.
// Values are literal: * has no meaning.
func FromMap(values map[string]string) Selector {
	terms := make([]Term, 0, len(values))
	for name, value := range values {
		t := Term{Field: FieldLabel, Label: name, Values: []Value{{Text: value}}}
		if name == FieldDevice.String() {
			t.Field, t.Label, t.Values[0].Text = FieldDevice, "", normalID(value)
		}
		terms = append(terms, t.finish())
	}
	return newSelector(terms)
}

// In returns a selector of the devices with one of these literal values in a field other than a label.
func In(f Field, values ...string) Selector {
	t := Term{Field: f}
	for _, value := range values {
		t.Values = append(t.Values, Value{Text: value})
	}
	return newSelector([]Term{t.finish()})
}

// Not returns a selector of the devices that a term does not match; ok is false for comparisons.
func Not(t Term) (not Selector, ok bool) {
	switch t.Op {
	case OpIn:
		t.Op = OpNotIn
	case OpNotIn:
		t.Op = OpIn
	case OpHas:
		t.Op = OpLacks
	case OpLacks:
		t.Op = OpHas
	default:
		return Selector{}, false
	}
	t.Values = slices.Clone(t.Values)
	return newSelector([]Term{t.finish()}), true
}

// And returns a selector of the devices that both match. It has no limits: Parse may refuse its text.
func And(a, b Selector) Selector {
	switch {
	case a.IsZero():
		return b
	case b.IsZero():
		return a
	}
	return newSelector(slices.Concat(a.terms, b.terms))
}

// At returns the selector with relative times that count from a time, whenever it is evaluated.
func (s Selector) At(from time.Time) Selector {
	s.terms = slices.Clone(s.terms)
	for i := range s.terms {
		s.terms[i].from = from
	}
	return s
}

// IsZero reports whether every device matches. It makes `omitzero` work.
func (s Selector) IsZero() bool { return len(s.terms) == 0 }

// Terms returns the terms, all of which must match.
func (s Selector) Terms() []Term { return slices.Clone(s.terms) }

// String returns the canonical text: it parses as the same selector, and selectors with the same terms have the
// same text.
func (s Selector) String() string {
	var b strings.Builder
	for i, t := range s.terms {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(t.text)
	}
	return b.String()
}

// Needs reports whether the value of a field is needed for the evaluation.
func (s Selector) Needs(f Field) bool {
	return slices.ContainsFunc(s.terms, func(t Term) bool { return t.Field == f })
}

// NeedsLabels reports whether the device's labels are needed.
func (s Selector) NeedsLabels() bool { return s.Needs(FieldLabel) }

// Identity returns a *FieldError unless the selector uses only the device's id and labels: operators set these,
// and access must not depend on anything else.
func (s Selector) Identity() error {
	for _, t := range s.terms {
		if t.Field != FieldDevice && t.Field != FieldLabel {
			return &FieldError{Field: t.Field}
		}
	}
	return nil
}

// FieldError is the error for a field that may not be used in API keys and policy.
type FieldError struct{ Field Field }

// Error returns the reason.
func (e *FieldError) Error() string {
	why := "is reported by the device itself"
	switch e.Field {
	case FieldName:
		why = "is free text"
	case FieldState, FieldTransport, FieldNode, FieldReason, FieldSeen:
		why = "changes with the connection of the device"
	}
	return "only device and labels may be used in API keys and policy: " + e.Field.String() + " " + why
}

// Check returns an error if Parse would refuse the selector. Selectors from JSON objects and FromMap may contain
// label keys that no device can have, more terms, or longer values.
func (s Selector) Check() error {
	_, err := Parse(s.String())
	return err
}
