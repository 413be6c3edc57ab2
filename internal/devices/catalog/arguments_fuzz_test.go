package catalog

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/jsonschema-go/jsonschema"

	"fleetd/internal/devices"
)

// FuzzSchemaAndArguments compares the simple checker with a JSON Schema validator that
// fleetd does not use: accepted arguments are valid, refused ones are not. Intended
// differences:
//
//   - an integer without bounds must fit 32 bits, as on the device, and has at most 18
//     digits;
//   - of duplicate names each value is checked; others use the last;
//   - a name that equals a property's only when case is ignored is refused, because the
//     device uses its value;
//   - annotations are ignored: a description may be a number.
//
// Complex schemas, which the product leaves to its own validator, are only checked for the
// guarantees to callers.
func FuzzSchemaAndArguments(f *testing.F) {
	for _, schema := range []string{otto, `{"type":"object","properties":{"x":{"anyOf":[{"type":"null"}],"pattern":"("}}}`,
		`{"type":"object","properties":{"n":{"type":"integer","minimum":-5,"maximum":5e0},"s":{"type":"string"}},"required":["s","n"]}`,
		`{"properties":{"b":{"type":"boolean","title":"t","default":true},"":{"type":"integer"}},"$schema":"https://json-schema.org/draft/2020-12/schema"}`,
		`{"type":"object","properties":{"a/b~c":{"type":"string"}},"required":["a/b~c"],"description":"d"}`} {
		for _, args := range []string{`{"on":true,"steps":3.0,"action":"x"}`, `{"x":[1]}`, `{"n":-5,"s":""}`, `{"n":6,"s":null}`, `{"b":1,"":2147483648}`, `{"b":null}`, `{"s":1,"n":null}`, `{"a/b~c":{}}`, ``, `[]`} {
			f.Add([]byte(schema), []byte(args))
		}
	}
	f.Fuzz(func(t *testing.T, raw, args []byte) {
		if !json.Valid(raw) {
			return
		}
		c, err := New([]byte(`[{"name":"t","inputSchema":` + string(raw) + `}]`))
		if err != nil {
			return
		}
		args = bytes.Trim(args, " \t\r\n") // callers pass the span of a value
		refused := c.Tool("t").CheckCall(args)
		if refused != nil && refused.Code == devices.CodeInvalidArguments && len(refused.Faults) == 0 {
			t.Fatal("refused without a fault")
		}
		if schema := c.Tool("t").schema; schema.complex == nil {
			compareValidator(t, &schema, args, refused)
			return
		}
		if refused != nil {
			for _, fault := range refused.Faults {
				if len(refused.Faults) > maxFaults || !utf8.ValidString(fault.Detail) {
					t.Fatalf("%d faults, %q", len(refused.Faults), fault)
				}
			}
		}
	})
}

func compareValidator(t *testing.T, s *schema, args []byte, refused *devices.Error) {
	if len(args) == 0 {
		args = []byte("{}")
	}
	var literals map[string]json.RawMessage
	if err := json.Unmarshal(args, &literals); err != nil || literals == nil {
		if refused == nil || refused.Code != devices.CodeBadRequest {
			t.Fatalf("%q: %v, encoding/json returns %v", args, refused, err)
		}
		return
	}
	if refused != nil && refused.Code != devices.CodeInvalidArguments {
		if utf8.Valid(args) && nesting(args) < 64 {
			t.Fatalf("%q: %v", args, refused)
		}
		return
	}
	if hasDuplicates(s.raw) || hasDuplicates(args) {
		return
	}
	if len(s.shadows(args)) > 0 {
		if refused == nil {
			t.Fatalf("%s\naccepts %s", s.raw, args)
		}
		return
	}
	var instance map[string]any
	if json.Unmarshal(args, &instance) != nil {
		return // a number outside the range of a float64
	}
	var theirs jsonschema.Schema
	if json.Unmarshal(s.raw, &theirs) != nil {
		return // an annotation of another type
	}
	theirs.Schema = "" // the simple checker treats every draft alike
	resolved, err := theirs.Resolve(nil)
	if err != nil {
		t.Fatalf("%s: %v", s.raw, err)
	}
	err = resolved.Validate(instance)
	switch {
	case refused == nil && err != nil:
		t.Fatalf("%s\naccepts %s\n%v", s.raw, args, err)
	case refused != nil && err == nil && !isOutOfRange(s, instance, literals):
		t.Fatalf("%s\nrefuses %s\n%v", s.raw, args, refused.Faults)
	}
}

// isOutOfRange reports whether an integer does not fit the device, or is too long to parse.
func isOutOfRange(s *schema, instance map[string]any, literals map[string]json.RawMessage) bool {
	for _, p := range s.properties {
		n, ok := instance[p.name].(float64)
		if ok && p.kind == integerKind && (n < math.MinInt32 || n > math.MaxInt32 || len(literals[p.name]) > 18) {
			return true
		}
	}
	return false
}

func nesting(text []byte) int {
	return bytes.Count(text, []byte("[")) + bytes.Count(text, []byte("{"))
}

// hasDuplicates reports whether an object has two members whose names are equal for
// encoding/json.
func hasDuplicates(text []byte) bool {
	d := json.NewDecoder(bytes.NewReader(text))
	return duplicatesIn(d)
}

func duplicatesIn(d *json.Decoder) bool {
	token, err := d.Token()
	if err != nil || token != json.Delim('{') && token != json.Delim('[') {
		return err != nil
	}
	names := map[string]bool{}
	for d.More() {
		if token == json.Delim('{') {
			name, err := d.Token()
			text, ok := name.(string)
			if text = strings.ToLower(text); err != nil || !ok || names[text] {
				return true
			}
			names[text] = true
		}
		if duplicatesIn(d) {
			return true
		}
	}
	_, err = d.Token()
	return err != nil
}
