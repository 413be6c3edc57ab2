package catalog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// schema is a tool's inputSchema, prepared for checking. Schemas of the firmware (an object
// of boolean, integer and string properties with default, minimum, maximum and required;
// mcp_server.h:125-165) are checked here without allocating; other schemas by a JSON Schema
// validator that is compiled when first needed.
type schema struct {
	raw        []byte
	properties []property
	complex    *compiled // nil if the simple checker is sufficient
}

type property struct {
	name      string
	kind      propertyKind
	required  bool
	min, max  int64
	hasBounds bool
	defaulted bool
}

type propertyKind uint8

const (
	anyKind propertyKind = iota
	booleanKind
	integerKind
	stringKind
)

type compiled struct {
	once   sync.Once
	schema *jsonschema.Schema
	err    error
}

// parseSchema never fails: a schema that the simple checker does not support is complex.
func parseSchema(raw []byte) schema {
	s := schema{raw: raw}
	simple := true
	var required []byte
	walk := jsonspan.Object(raw)
	for walk.Next() {
		value := walk.Value()
		switch string(walk.Key()) {
		case "type":
			text, _ := jsonspan.StringBytes(value)
			simple = simple && string(text) == "object"
		case "properties":
			simple = s.parseProperties(value) && simple
		case "required":
			required = value
		case "description", "title", "$schema":
		default:
			simple = false
		}
	}
	simple = simple && len(s.properties) <= maxSimple // one bit each in check
	if required != nil && simple {
		names := jsonspan.Array(required)
		for names.Next() && simple {
			name, _ := jsonspan.StringBytes(names.Value())
			simple = s.require(string(name))
		}
		simple = simple && names.Err() == nil
	}
	if walk.Err() != nil || !simple {
		s.complex = &compiled{}
	}
	return s
}

// maxSimple is the maximum number of properties of a simple schema.
const maxSimple = 64

func (s *schema) require(name string) bool {
	for i := range s.properties {
		if s.properties[i].name == name {
			s.properties[i].required = true
			return true
		}
	}
	return false
}

func (s *schema) parseProperties(raw []byte) (simple bool) {
	simple = true
	walk := jsonspan.Object(raw)
	for walk.Next() {
		p := property{name: string(walk.Key()), min: math.MinInt32, max: math.MaxInt32}
		inner := jsonspan.Object(walk.Value())
		for inner.Next() {
			value := inner.Value()
			switch string(inner.Key()) {
			case "type":
				text, _ := jsonspan.StringBytes(value)
				switch string(text) {
				case "boolean":
					p.kind = booleanKind
				case "integer":
					p.kind = integerKind
				case "string":
					p.kind = stringKind
				default:
					simple = false
				}
			case "minimum", "maximum":
				n, ok := jsonspan.Int(value)
				simple = simple && ok
				p.hasBounds = true
				if string(inner.Key()) == "minimum" {
					p.min = n
				} else {
					p.max = n
				}
			case "default":
				p.defaulted = true
			case "description", "title":
			default:
				simple = false
			}
		}
		simple = simple && inner.Err() == nil && (p.kind != anyKind) && (!p.hasBounds || p.kind == integerKind)
		s.properties = append(s.properties, p)
	}
	return simple && walk.Err() == nil
}

// check returns every fault of args, which must be a JSON object or empty. The firmware's own
// checks are weaker: an argument of a wrong type silently becomes its default
// (mcp_server.cc:524-542).
func (s *schema) check(args []byte) ([]devices.Fault, error) {
	if len(args) == 0 {
		args = []byte("{}")
	}
	if jsonspan.KindOf(args) != jsonspan.KindObject {
		return nil, jsonspan.ErrType
	}
	shadows := s.shadows(args)
	if s.complex != nil {
		faults, err := s.checkComplex(args)
		return append(shadows, faults...), err
	}
	faults := shadows
	var seen uint64
	walk := jsonspan.Object(args)
	for walk.Next() {
		for i := range s.properties {
			if p := &s.properties[i]; p.name == string(walk.Key()) {
				seen |= 1 << i
				if detail := p.fault(walk.Value()); detail != "" {
					faults = append(faults, devices.Fault{Pointer: jsonspan.Pointer(p.name), Detail: detail})
				}
			}
		}
	}
	if err := walk.Err(); err != nil {
		return nil, err
	}
	for i := range s.properties {
		if p := &s.properties[i]; p.required && seen>>i&1 == 0 {
			faults = append(faults, devices.Fault{Pointer: jsonspan.Pointer(p.name), Detail: "is required"})
		}
	}
	return faults, nil
}

// shadows finds members whose names equal a property only when case is ignored. The device
// uses the first of them (cJSON), whatever was checked here.
func (s *schema) shadows(args []byte) (faults []devices.Fault) {
	for walk := jsonspan.Object(args); walk.Next(); {
		if name := s.shadowed(string(walk.Key())); name != "" {
			faults = append(faults, devices.Fault{Pointer: jsonspan.Pointer(string(walk.Key())),
				Detail: fmt.Sprintf("the device reads this name as %q: use this spelling", devices.Clip(name))})
		}
	}
	return faults
}

func (s *schema) shadowed(key string) (name string) {
	for i := range s.properties {
		switch p := &s.properties[i]; {
		case p.name == key:
			return ""
		case strings.EqualFold(p.name, key):
			name = p.name
		}
	}
	return name
}

func (p *property) fault(value []byte) string {
	switch p.kind {
	case booleanKind:
		if k := jsonspan.KindOf(value); k != jsonspan.KindTrue && k != jsonspan.KindFalse {
			return fmt.Sprintf("must be true or false, not %.40s", value)
		}
	case stringKind:
		if jsonspan.KindOf(value) != jsonspan.KindString {
			return fmt.Sprintf("must be a string, not %.40s", value)
		}
	case integerKind:
		n, ok := jsonspan.Int(value)
		switch {
		case !ok:
			return fmt.Sprintf("must be an integer, not %.40s", value)
		case n < p.min:
			return fmt.Sprintf("must be at least %d, not %d", p.min, n)
		case n > p.max:
			return fmt.Sprintf("must be at most %d, not %d", p.max, n)
		}
	}
	return ""
}

// denyLoader refuses references to other documents: a device must not make fleetd read
// files or connect to hosts.
type denyLoader struct{}

func (denyLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("the schema refers to %s; references to other documents are not followed", url)
}

// Limits of the cost of a device's schema. Arguments for a schema beyond them are checked
// only by the device.
const (
	maxSchema      = 16 << 10 // bytes
	maxFaults      = 20
	maxFaultDetail = 200 // bytes
)

var errCostly = errors.New("the schema may be too costly to check")

// affordable reports whether a schema is free of constructs with which a short schema costs
// unlimited time or memory: references (which multiply), patterns (whose repetitions
// expand), and numbers too long for exact arithmetic.
func affordable(value []byte) bool {
	switch jsonspan.KindOf(value) {
	case jsonspan.KindNumber:
		return plainNumber(value)
	case jsonspan.KindArray:
		walk := jsonspan.Array(value)
		for walk.Next() {
			if !affordable(walk.Value()) {
				return false
			}
		}
	case jsonspan.KindObject:
		walk := jsonspan.Object(value)
		for walk.Next() {
			switch string(walk.Key()) {
			case "$ref", "$dynamicRef", "$recursiveRef", "pattern":
				if jsonspan.KindOf(walk.Value()) == jsonspan.KindString {
					return false
				}
			case "patternProperties", "multipleOf":
				return false
			}
			if !affordable(walk.Value()) {
				return false
			}
		}
	}
	return true
}

// plainNumbers reports whether every number in a value is a plainNumber.
func plainNumbers(value []byte) bool {
	switch jsonspan.KindOf(value) {
	case jsonspan.KindNumber:
		return plainNumber(value)
	case jsonspan.KindArray, jsonspan.KindObject:
		walk := jsonspan.Array(value)
		if value[0] == '{' {
			walk = jsonspan.Object(value)
		}
		for walk.Next() {
			if !plainNumbers(walk.Value()) {
				return false
			}
		}
	}
	return true
}

// plainNumber reports whether exact arithmetic with the number is cheap.
func plainNumber(literal []byte) bool {
	mantissa, exponent, found := bytes.Cut(literal, []byte("e"))
	if !found {
		mantissa, exponent, _ = bytes.Cut(literal, []byte("E"))
	}
	return len(mantissa) <= 64 && len(exponent) <= 4
}

// maxCheck limits the product of the lengths of a schema and of its arguments, in bytes: for
// example 2 KB of schema and 2 KB of arguments.
const maxCheck = 4 << 20

func (s *schema) checkComplex(args []byte) (faults []devices.Fault, err error) {
	if !plainNumbers(args) {
		return []devices.Fault{{Detail: "contains a number that is too long to check"}}, nil
	}
	if len(s.raw)*len(args) > maxCheck {
		return nil, nil // the cost may grow with the product: let the device decide
	}
	defer func() {
		if recover() != nil { // a panic of the validator must not affect the caller
			faults, err = nil, nil
		}
	}()
	s.complex.once.Do(func() {
		s.complex.err = errCostly
		if len(s.raw) > maxSchema || !affordable(s.raw) {
			return
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(s.raw))
		if err != nil {
			s.complex.err = err
			return
		}
		compiler := jsonschema.NewCompiler()
		compiler.UseLoader(denyLoader{})
		if s.complex.err = compiler.AddResource("mem:tool", doc); s.complex.err == nil {
			s.complex.schema, s.complex.err = compiler.Compile("mem:tool")
		}
	})
	if s.complex.err != nil || s.complex.schema == nil {
		return nil, nil // the device's schema is not valid: let the device decide
	}
	instance, err := jsonschema.UnmarshalJSON(bytes.NewReader(args))
	if err != nil {
		return nil, err
	}
	var invalid *jsonschema.ValidationError
	if err := s.complex.schema.Validate(instance); errors.As(err, &invalid) {
		return leaves(invalid, nil), nil
	}
	return nil, nil
}

var english = message.NewPrinter(language.English)

func leaves(e *jsonschema.ValidationError, faults []devices.Fault) []devices.Fault {
	if len(faults) >= maxFaults {
		return faults
	}
	if len(e.Causes) == 0 {
		at := ""
		for _, step := range e.InstanceLocation {
			at += jsonspan.Pointer(step)
		}
		detail := e.ErrorKind.LocalizedString(english)
		return append(faults, devices.Fault{Pointer: at, Detail: strings.ToValidUTF8(detail[:min(len(detail), maxFaultDetail)], "\uFFFD")})
	}
	for _, cause := range e.Causes {
		faults = leaves(cause, faults)
	}
	return faults
}

// CheckCall returns an error if the tool's schema does not allow the arguments, or the
// firmware would misread them.
func (t *Tool) CheckCall(args json.RawMessage) *devices.Error {
	faults, err := t.schema.check(args)
	if err != nil {
		return devices.Errorf(devices.CodeBadRequest, "arguments must be a JSON object: %v", err)
	}
	// The default of this tool's url is its description (mcp_server.cc:152-155): called without
	// one, the device stops its audio and tries to download that sentence.
	if t.Name == UpgradeFirmware && jsonspan.Member(args, "url") == nil {
		faults = append(faults, devices.Fault{Pointer: "/url", Detail: "is required"})
	}
	if len(faults) > 0 {
		return &devices.Error{Code: devices.CodeInvalidArguments, Faults: faults,
			Detail: fmt.Sprintf("the arguments of %s are not valid", t.Name)}
	}
	return nil
}
