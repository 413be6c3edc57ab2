package jsontest

import (
	"bytes"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// Document is an OpenAPI document to which answers are compared. No object may have members that it does not describe. It is safe
// for concurrent use.
type Document struct {
	root     map[string]any
	routes   *http.ServeMux // finds the operation of a request
	compiler *jsonschema.Compiler
	mu       sync.Mutex
	schemas  map[string]*jsonschema.Schema
}

const documentURL = "openapi.json"

// NewDocument reads a document.
func NewDocument(text string) (*Document, error) {
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	closeObjects(v)
	root, _ := v.(map[string]any)
	d := &Document{root: root, routes: http.NewServeMux(), compiler: jsonschema.NewCompiler(), schemas: map[string]*jsonschema.Schema{}}
	d.compiler.AssertFormat()
	if err := d.compiler.AddResource(documentURL, v); err != nil {
		return nil, err
	}
	paths, _ := root["paths"].(map[string]any)
	for path, item := range paths {
		operations, _ := item.(map[string]any)
		for method := range operations {
			d.routes.Handle(strings.ToUpper(method)+" "+path, http.NotFoundHandler())
		}
	}
	return d, nil
}

// closeObjects makes every member that a schema does not describe a fault. The document leaves answers open, since clients
// must live with newer servers.
func closeObjects(v any) {
	switch v := v.(type) {
	case map[string]any:
		for _, child := range v {
			closeObjects(child)
		}
		_, described := v["properties"].(map[string]any)
		if _, said := v["additionalProperties"]; described && !said {
			v["additionalProperties"] = false
		}
	case []any:
		for _, child := range v {
			closeObjects(child)
		}
	}
}

// Lie returns in what an answer is not as the document says; empty if it is, or is of no operation.
func (d *Document) Lie(r *http.Request, status int, header http.Header, body []byte) string {
	_, pattern := d.routes.Handler(r)
	method, path, ok := strings.Cut(pattern, " ")
	if !ok || r.Method != method {
		return "" // of no operation, or HEAD
	}
	place := []string{"paths", path, strings.ToLower(method), "responses", strconv.Itoa(status)}
	said := at(d.root, place)
	if said == nil {
		place[len(place)-1] = "default"
		said = at(d.root, place)
	}
	content, _ := at(said, []string{"content"}).(map[string]any)
	mediaType, _, _ := mime.ParseMediaType(header.Get("Content-Type"))
	switch {
	case status == http.StatusNotModified:
		return ""
	case said == nil:
		return fmt.Sprintf("%s has no answer with status %d", pattern, status)
	case content == nil && len(body) > 0:
		return fmt.Sprintf("%s has no content with status %d", pattern, status)
	case content == nil:
		return ""
	case content[mediaType] == nil:
		return fmt.Sprintf("%s has no %s with status %d", pattern, mediaType, status)
	case mediaType != "application/json" && mediaType != "application/problem+json":
		return ""
	}
	schema, err := d.schema(append(place, "content", mediaType, "schema"))
	if err != nil {
		return err.Error()
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err == nil {
		err = schema.Validate(value)
	}
	if err != nil {
		return fmt.Sprintf("%s, %d: %v", pattern, status, err)
	}
	return ""
}

// at returns the value at a place of a document; nil if there is none.
func at(v any, place []string) any {
	for _, name := range place {
		members, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = members[name]
	}
	return v
}

// schema returns the schema at a place.
func (d *Document) schema(place []string) (*jsonschema.Schema, error) {
	pointer := documentURL + "#"
	for _, name := range place {
		pointer += "/" + strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D").Replace(name)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.schemas[pointer]
	if s == nil {
		var err error
		if s, err = d.compiler.Compile(pointer); err != nil {
			return nil, err
		}
		d.schemas[pointer] = s
	}
	return s, nil
}
