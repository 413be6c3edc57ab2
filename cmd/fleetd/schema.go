package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/big"
	"slices"
	"strings"
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
	members, err := orderedMembers(data)
	if err != nil {
		return err
	}
	for _, m := range members {
		next := property{name: m.name}
		// An argument this program cannot read is still an argument: its value is then passed as it is typed.
		_ = json.Unmarshal(m.value, &next)
		*p = append(*p, next)
	}
	return nil
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
		return guess(text)
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
func guess(text string) (json.RawMessage, error) {
	if json.Valid([]byte(text)) {
		return json.RawMessage(text), nil
	}
	return jsonString(text)
}

// asType returns the text as JSON of the named type, or nil if it is none.
func asType(name, text string) json.RawMessage {
	raw := []byte(strings.TrimSpace(text))
	switch name {
	case "string":
		value, err := jsonString(text)
		if err != nil {
			return nil
		}
		return value
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

// jsonString encodes text without the escapes that only HTML needs.
func jsonString(text string) (json.RawMessage, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(text); err != nil {
		return nil, fmt.Errorf("encode a text: %w", err)
	}
	return bytes.TrimSpace(out.Bytes()), nil
}

// member is one member of a JSON object.
type member struct {
	name  string
	value json.RawMessage
}

// orderedMembers reads a JSON object in the order in which it is written; null has no members.
func orderedMembers(object []byte) ([]member, error) {
	decoder := json.NewDecoder(bytes.NewReader(object))
	start, err := decoder.Token()
	if err != nil {
		return nil, fmt.Errorf("read an object: %w", err)
	}
	if start == nil {
		return nil, nil
	}
	if start != json.Delim('{') {
		return nil, fmt.Errorf("read an object: it starts with %v", start)
	}
	var members []member
	for decoder.More() {
		key, err := decoder.Token()
		if err != nil {
			return nil, fmt.Errorf("read an object: %w", err)
		}
		m := member{name: fmt.Sprint(key)}
		if err := decoder.Decode(&m.value); err != nil {
			return nil, fmt.Errorf("read an object: %w", err)
		}
		members = append(members, m)
	}
	return members, nil
}
