package restapi

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"html/template"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
)

//go:embed page.html
var pageSource string

//go:embed page.css
var pageStyle string

// pageTemplate is the page at /docs.
var pageTemplate = template.Must(template.New("page").Parse(pageSource))

// pageView is the document in the order of reading.
type pageView struct {
	Title, Version, Description string
	Style                       template.CSS
	Groups                      []pageGroup
	Schemas                     []pageSchema
}

type pageGroup struct {
	Name, Description string
	Operations        []pageOperation
}

type pageOperation struct {
	ID, Method, Path, Summary, Description string
	Public                                 bool
	Scope                                  string
	Params                                 []pageField
	Body                                   pageType
	Answers                                []pageAnswer
}

type pageAnswer struct {
	Status, Description, ContentType string
	Type                             pageType
}

type pageSchema struct {
	Name   string
	Fields []pageField
}

type pageField struct {
	Name, In, Description string
	Required              bool
	Type                  pageType
}

// pageType words a schema; Ref is set if it is, or lists, a named one.
type pageType struct{ Text, Ref string }

// renderPage makes the page and the policy that lets it use its own style and
// nothing else: no script, no request, no frame around it.
func renderPage(document *huma.OpenAPI) (page []byte, policy string) {
	view := pageView{Title: document.Info.Title, Version: document.Info.Version, Description: document.Info.Description,
		Style: template.CSS(pageStyle), Groups: pageGroups(document)}
	schemas := document.Components.Schemas.Map()
	for _, name := range slices.Sorted(maps.Keys(schemas)) {
		view.Schemas = append(view.Schemas, pageSchema{name, pageFields(schemas[name])})
	}
	var b bytes.Buffer
	if err := pageTemplate.Execute(&b, view); err != nil {
		panic("the page at /docs does not render: " + err.Error()) // a fault of the program, found by any test
	}
	digest := sha256.Sum256([]byte(pageStyle))
	return b.Bytes(), "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(digest[:]) +
		"'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}

func pageGroups(document *huma.OpenAPI) []pageGroup {
	byTag := map[string][]pageOperation{}
	for path, item := range document.Paths {
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Put, item.Patch, item.Delete} {
			if op != nil {
				byTag[op.Tags[0]] = append(byTag[op.Tags[0]], newPageOperation(path, op))
			}
		}
	}
	var groups []pageGroup
	for _, tag := range document.Tags {
		operations := byTag[tag.Name]
		slices.SortFunc(operations, func(a, b pageOperation) int {
			return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Method, b.Method))
		})
		groups = append(groups, pageGroup{tag.Name, tag.Description, operations})
	}
	return groups
}

func newPageOperation(path string, op *huma.Operation) pageOperation {
	view := pageOperation{ID: op.OperationID, Method: op.Method, Path: path, Summary: op.Summary, Description: op.Description, Public: len(op.Security) == 0}
	for _, need := range op.Security {
		view.Scope = strings.Join(need["token"], ", ")
	}
	for _, p := range op.Parameters {
		view.Params = append(view.Params, pageField{p.Name, p.In, p.Description, p.Required, newPageType(p.Schema)})
	}
	if op.RequestBody != nil {
		var names string
		if names, view.Body = pageContent(op.RequestBody.Content); names != valueJSON[0] {
			view.Body.Text += " (" + names + ")"
		}
	}
	for _, status := range slices.Sorted(maps.Keys(op.Responses)) {
		response := op.Responses[status]
		a := pageAnswer{Status: status, Description: response.Description}
		a.Description = cmp.Or(a.Description, http.StatusText(op.DefaultStatus))
		a.ContentType, a.Type = pageContent(response.Content)
		view.Answers = append(view.Answers, a)
	}
	return view
}

// pageContent are the types that a body may have, and what one has.
func pageContent(content map[string]*huma.MediaType) (names string, t pageType) {
	types := slices.Sorted(maps.Keys(content))
	for _, name := range types {
		t = newPageType(content[name].Schema)
	}
	return strings.Join(types, " or "), t
}

func pageFields(s *huma.Schema) []pageField {
	var fields []pageField
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		p := s.Properties[name]
		fields = append(fields, pageField{Name: name, Description: p.Description, Required: slices.Contains(s.Required, name), Type: newPageType(p)})
	}
	return fields
}

func newPageType(s *huma.Schema) pageType {
	switch {
	case s == nil:
		return pageType{}
	case s.Ref != "":
		name := s.Ref[strings.LastIndexByte(s.Ref, '/')+1:]
		return pageType{name, name}
	case s.Type == huma.TypeArray:
		inner := newPageType(s.Items)
		return pageType{"list of " + inner.Text, inner.Ref}
	case len(s.Enum) > 0:
		var values []string
		for _, v := range s.Enum {
			if text, ok := v.(string); ok {
				values = append(values, `"`+text+`"`)
			}
		}
		return pageType{Text: strings.Join(values, " | ")}
	case s.Type == "":
		return pageType{Text: "any JSON"}
	}
	text := s.Type
	if s.Format != "" {
		text += " (" + s.Format + ")"
	}
	if s.Nullable {
		text += " or null"
	}
	return pageType{Text: text}
}
