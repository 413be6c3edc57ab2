package main

import (
	"encoding/json"
	"math/big"
	"slices"
	"strings"

	"fleetd/internal/jsonspan"
)

// tool is what the command line understands of a tool; everything else in it is left alone.
type tool struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	InputSchema struct {
		Properties properties `json:"properties"`
		Required   []string   `json:"required"`
	} `json:"inputSchema"`
	Annotations struct {
		Audience []string `json:"audience"`
	} `json:"annotations"`
}

// userOnly reports whether the device hides the tool from language models.
func (t tool) userOnly() bool {
	return slices.Equal(t.Annotations.Audience, []string{"user"})
}

// property is one argument of a tool. Members that are absent are nil.
type property struct {
	name        string
	Type        typeNames       `json:"type"`
	Description string          `json:"description"`
	Default     json.RawMessage `json:"default"`
	Minimum     json.RawMessage `json:"minimum"`
	Maximum     json.RawMessage `json:"maximum"`
	Enum        json.RawMessage `json:"enum"`
}

// properties keeps the order in which the device lists them, which is the order its author had in mind.
type properties []property

// UnmarshalJSON reads the members of an object in order.
func (p *properties) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}
	walk := jsonspan.Object(data)
	for walk.Next() {
		next := property{name: string(walk.Key())}
		// An argument this program cannot read is still an argument: its value is then passed as it is typed.
		_ = json.Unmarshal(walk.Value(), &next)
		*p = append(*p, next)
	}
	return walk.Err()
}

// typeNames is the "type" of a schema, a name or a list of names.
type typeNames []string

// UnmarshalJSON reads both forms.
func (t *typeNames) UnmarshalJSON(data []byte) error {
	var one string
	if json.Unmarshal(data, &one) == nil {
		*t = typeNames{one}
		return nil
	}
	return json.Unmarshal(data, (*[]string)(t))
}

// find returns the argument of this name, or nil.
func (p properties) find(name string) *property {
	if i := slices.IndexFunc(p, func(q property) bool { return q.name == name }); i >= 0 {
		return &p[i]
	}
	return nil
}

// value turns what was typed on the command line into JSON of the argument's type.
func (p property) value(text string) (json.RawMessage, error) {
	if len(p.Type) == 0 {
		return guess(text), nil
	}
	for _, name := range p.Type {
		if value := asType(name, text); value != nil {
			return value, nil
		}
	}
	kind := strings.Join(p.Type, " or ")
	if len(p.Type) == 1 {
		kind = map[string]string{"integer": "a whole number", "number": "a number", "boolean": "true or false",
			"array": "a JSON array", "object": "a JSON object"}[kind]
	}
	return nil, failed("the argument %s must be %s, not %q", p.name, kind, text)
}

// guess takes a value without a known type as JSON, and as text if it is none.
func guess(text string) json.RawMessage {
	if json.Valid([]byte(text)) {
		return json.RawMessage(text)
	}
	return jsonspan.AppendString(nil, text)
}

// asType returns the text as JSON of the named type, or nil if it is none.
func asType(name, text string) json.RawMessage {
	raw := []byte(strings.TrimSpace(text))
	switch name {
	case "string":
		return jsonspan.AppendString(nil, text)
	case "integer":
		// Through big.Int, so that +5 and 007 become JSON and no digit is lost.
		if n, ok := new(big.Int).SetString(string(raw), 10); ok {
			return json.RawMessage(n.String())
		}
	case "number":
		if json.Valid(raw) && strings.ContainsAny(string(raw[:1]), "-0123456789") {
			return raw
		}
	case "boolean":
		if string(raw) == "true" || string(raw) == "false" {
			return raw
		}
	case "array":
		if json.Valid(raw) && raw[0] == '[' {
			return raw
		}
	case "object":
		if json.Valid(raw) && raw[0] == '{' {
			return raw
		}
	default:
		if json.Valid(raw) {
			return raw
		}
	}
	return nil
}
