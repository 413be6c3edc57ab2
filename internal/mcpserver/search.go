package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"fleetd/internal/access"
	"fleetd/internal/cleantext"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/finder"
	"fleetd/internal/jsonspan"
	"fleetd/internal/selector"
)

// Limits of a search.
const (
	maxSelected  = 10_000 // devices up to which a selector is applied before the search; of more, it is applied to the matches
	maxPageReads = 1000   // devices that are read for one page
	maxKeys      = 12     // labels in an empty result
	maxValues    = 8      // of each
	maxListed    = 5      // devices listed in an error
	maxChoices   = 20     // devices of which a person may choose one
)

// wordIndex is the search index of all devices.
type wordIndex struct {
	s      *Server
	keeper *finder.Keeper
}

func newWordIndex(s *Server) *wordIndex {
	w := &wordIndex{s: s}
	w.keeper = finder.NewKeeper(w, func(f func(context.Context)) bool {
		if s.ctx.Err() != nil {
			return false
		}
		s.tasks.Go(func() { f(s.ctx) })
		return true
	})
	s.opt.Service.OnDecision(func(id devices.ID) {
		if id == "" {
			w.keeper.Reset()
			return
		}
		w.keeper.Changed(string(id))
	})
	return w
}

// onReport records that a device reported a change.
func (w *wordIndex) onReport(id devices.ID) { w.keeper.Touched(string(id)) }

// Docs implements finder.Source.
func (w *wordIndex) Docs(ctx context.Context, after string, limit int) ([]finder.Doc, string, error) {
	views, next, err := w.s.opt.Service.List(ctx, devices.ListQuery{After: after, Limit: limit})
	return docsOf(views), next, err
}

// Count implements finder.Source.
func (w *wordIndex) Count(ctx context.Context) (int64, error) {
	counts, err := w.s.opt.Service.Counts(ctx, access.Principal{Caller: access.Admin}, selector.Selector{})
	return counts.Total, err
}

// DocsOf implements finder.Source.
func (w *wordIndex) DocsOf(ctx context.Context, ids []string) ([]finder.Doc, error) {
	views, err := w.s.views(ctx, ids, selector.Selector{})
	return docsOf(views), err
}

func docsOf(views []devices.View) []finder.Doc {
	docs := make([]finder.Doc, len(views))
	for i := range views {
		d := &views[i].Device
		docs[i] = finder.Doc{ID: string(d.ID), Name: d.Name, Board: d.Board, Labels: d.Labels, List: views[i].Presence.Catalog.String()}
	}
	return docs
}

// ToolsOf implements finder.Source.
func (w *wordIndex) ToolsOf(ctx context.Context, list string) ([]finder.Tool, error) {
	hash, err := devices.ParseHash(list)
	if err != nil {
		return nil, err
	}
	cat, err := w.s.opt.Service.Catalog(ctx, hash)
	if err != nil {
		return nil, nil // pruned since
	}
	return findableTools(cat), nil
}

func findableTools(cat *catalog.Catalog) (list []finder.Tool) {
	for i := range cat.Tools {
		if t := &cat.Tools[i]; cat.Tool(t.Name) == t {
			description, _ := jsonspan.String(jsonspan.Member(t.Raw, "description"))
			list = append(list, finder.Tool{Name: t.Name, Description: description, UserOnly: t.UserOnly})
		}
	}
	return list
}

// views returns the devices with these ids that a selector matches.
func (s *Server) views(ctx context.Context, ids []string, sel selector.Selector) (views []devices.View, err error) {
	q := devices.ListQuery{Select: selector.And(selector.In(selector.FieldDevice, ids...), sel), Limit: maxPageReads}
	for {
		page, next, err := s.opt.Service.List(ctx, q)
		if err != nil {
			return nil, err
		}
		if views = append(views, page...); next == "" {
			return views, nil
		}
		q.After = next
	}
}

// searchResult is the result of a search.
type searchResult struct {
	finder.Result
	devices []devices.View // a page
	matches map[string]*finder.Match
	next    string
}

// search finds the devices that match the words of a query and the selector best, among
// those that the caller may see. place is that at which the page before ended; empty: the first page.
func (s *Server) search(ctx context.Context, by access.Principal, args *findArgs, sel selector.Selector, place string, limit int) (f searchResult, err error) {
	if err := s.opt.Service.Permit(ctx, by, access.ScopeRead, ""); err != nil {
		return f, err
	}
	index, err := s.wordIndex.keeper.Index(ctx)
	if errors.Is(err, finder.ErrTooMany) {
		s.stats.Unindexed.Add(1)
		err = badArguments(fmt.Sprintf("word search is not available in a fleet of more than %d devices: leave out query and use select", finder.MaxDevices))
	}
	if err != nil {
		return f, err
	}
	guard := s.opt.Service.Guard()
	search := finder.Search{Text: args.Query, Do: args.Do, See: visibleTo(by), May: func(t *finder.Tool) bool {
		return guard.MayAllow(access.Query{By: by, Tool: t.Name, UserOnly: t.UserOnly})
	}}
	if !sel.IsZero() {
		ids := map[string]bool{}
		q := devices.ListQuery{Select: selector.And(by.Caller.Devices, sel), Limit: maxPageReads, Members: by.Caller.NeedsLabels()}
		for more := true; more && len(ids) < maxSelected; more = q.After != "" {
			var selected []devices.View
			if selected, q.After, err = s.opt.Service.List(ctx, q); err != nil {
				return f, err
			}
			for i := range selected {
				ids[string(selected[i].Device.ID)] = true
			}
		}
		if q.After == "" {
			search.Keep = func(d *finder.Doc) bool { return ids[d.ID] }
		}
	}
	if f.Result, err = index.Find(ctx, search); err != nil || f.Blank {
		return f, err
	}
	from := 0
	if place != "" {
		if from, err = strconv.Atoi(place); err != nil {
			return f, badArguments(devices.ErrCursor.Error())
		}
	}
	f.matches = map[string]*finder.Match{}
	at := from
	for end := from + maxPageReads; at < len(f.Found) && at < end && len(f.devices) < limit; {
		page := f.Found[at:min(at+limit-len(f.devices), len(f.Found))]
		ids := make([]string, len(page))
		for i, d := range page {
			ids[i] = d.ID
			f.matches[d.ID] = &page[i]
		}
		views, err := s.views(ctx, ids, sel)
		if err != nil {
			return f, err
		}
		slices.SortFunc(views, func(a, b devices.View) int {
			return slices.Index(ids, string(a.Device.ID)) - slices.Index(ids, string(b.Device.ID))
		})
		f.devices = append(f.devices, views...)
		at += len(page)
	}
	if at < len(f.Found) {
		f.next = strconv.Itoa(at)
	}
	return f, nil
}

// visibleTo returns a function that reports whether the caller may see a device.
func visibleTo(by access.Principal) func(*finder.Doc) bool {
	return func(d *finder.Doc) bool { return by.Caller.Devices.MatchIdentity(d.ID, d.Labels) }
}

// severalError says that several devices fit where one is meant.
type severalError struct {
	err  *devices.Error // what hosts that cannot ask are told
	docs []finder.Match
}

func (e *severalError) Error() string { return e.err.Error() }
func (e *severalError) Unwrap() error { return e.err }

// deviceOf returns the device with an id, or with a name that no other device has. The error is a *severalError if several fit.
func (s *Server) deviceOf(ctx context.Context, by access.Principal, text string) (devices.ID, error) {
	if strings.TrimSpace(text) == "" {
		return "", badArguments("device is missing: give the id or the name of a device; find_devices lists them")
	}
	id, idErr := devices.ParseID(text)
	if idErr == nil && s.opt.Service.Registry().Status(id, "").Known {
		return id, nil
	}
	err := s.opt.Service.Permit(ctx, by, access.ScopeRead, "")
	var index *finder.Index
	if err == nil {
		index, err = s.wordIndex.keeper.Index(ctx)
	}
	if err != nil { // names cannot be looked up
		if idErr != nil {
			return "", badArguments(idErr.Error())
		}
		return id, nil
	}
	shown := cleantext.Short(text, maxTitle)
	switch named := index.Named(text, visibleTo(by)); {
	case len(named) == 1:
		return devices.ID(named[0].ID), nil
	case len(named) > 1:
		return "", &severalError{several(fmt.Sprintf("%d devices have the name %q", len(named), shown), named), named}
	}
	if idErr == nil {
		if _, err := s.opt.Service.Get(ctx, id); err == nil { // it waits for approval
			return id, nil
		}
	}
	detail := fmt.Sprintf("no device has the id or the name %q", shown)
	if len(text) <= maxNameBytes {
		like, err := index.Find(ctx, finder.Search{Text: text, See: visibleTo(by), May: func(*finder.Tool) bool { return false }})
		if err == nil && len(like.Found) > 0 && len(like.Found[0].Missing) == 0 {
			return "", &severalError{several(detail+", but these fit", like.Found), like.Found}
		}
	}
	if idErr == nil {
		return id, nil // the caller of deviceOf says that it is not known
	}
	return "", badArguments(detail + "; find_devices finds devices by words")
}

// several is the error that lists devices of which one is meant.
func several(what string, docs []finder.Match) *devices.Error {
	var list []string
	for _, d := range docs[:min(len(docs), maxListed)] {
		list = append(list, cleantext.Short(d.Name, maxTitle)+" ("+d.ID+")")
	}
	if len(docs) > maxListed {
		list = append(list, "...")
	}
	return devices.Errorf(devices.CodeInvalidArguments, "%s: %s; ask which one is meant, and give its id", what, strings.Join(list, ", "))
}

// selectorOf parses the select of a tool. Models write the id of a device as id, as answers do, and names without quotes: where the text
// is no selector, values of more than one word are read as if they were quoted, unless the words may be meant as more terms.
func selectorOf(text string) (selector.Selector, error) {
	terms := splitOutside(text)
	for i := range terms {
		terms[i] = idTerm.ReplaceAllString(terms[i], "device$1")
	}
	sel, err := selector.Parse(strings.Join(terms, ","))
	if err == nil {
		return sel, nil
	}
	for i, term := range terms {
		if m := bareValue.FindStringSubmatch(term); m != nil {
			terms[i] = m[1] + quote(m[2])
		} else if m := bareList.FindStringSubmatch(term); m != nil {
			items := splitOutside(m[2])
			for k := range items {
				items[k] = quote(items[k])
			}
			terms[i] = m[1] + strings.Join(items, ",") + ")"
		}
	}
	if sel, second := selector.Parse(strings.Join(terms, ",")); second == nil {
		return sel, nil
	}
	return sel, badArguments(err.Error())
}

var (
	idTerm    = regexp.MustCompile(`^\s*id(\s*!?=|\s+(?:not\s+)?in\b)`)
	bareValue = regexp.MustCompile(`^([^"=!<>()]+=\s*)([^"=()]+)$`)
	bareList  = regexp.MustCompile(`^([^"=!<>() ]+\s+in\s*\()(.*)\)\s*$`)
	severalIn = regexp.MustCompile(`(?i)!|\b(?:and|or|not|in)\b`)
)

// quote writes a value of several words in quotes.
func quote(value string) string {
	value = strings.TrimSpace(value)
	if !strings.Contains(value, " ") || strings.ContainsRune(value, '"') || severalIn.MatchString(value) {
		return value
	}
	return `"` + value + `"`
}

// splitOutside splits a text at commas outside quotes and brackets.
func splitOutside(text string) (parts []string) {
	from, depth, quoted := 0, 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '(':
			depth++
		case c == ')':
			depth--
		case c == ',' && depth == 0:
			parts, from = append(parts, text[from:i]), i+1
		}
	}
	return append(parts, text[from:])
}

// deviceKey is the key of the choice of a device in InputRequests.
const deviceKey = "device"

// chosen is deviceOf for a call: where several devices fit, the host asks the person. asked is its question, if not nil. The choice
// is kept in the state of the request, since the call may have to be confirmed as well.
func (s *Server) chosen(ctx context.Context, req *mcp.CallToolRequest, by access.Principal, text string) (id devices.ID, asked *mcp.CallToolResult, err error) {
	id, err = s.deviceOf(ctx, by, text)
	var fits *severalError
	if !errors.As(err, &fits) {
		return id, nil, err
	}
	choice := ""
	if answer, ok := req.Params.InputResponses[deviceKey].(*mcp.ElicitResult); ok {
		if answer.Action != "accept" {
			return "", nil, badArguments("the person did not say which device is meant; nothing was called")
		}
		choice, _ = answer.Content[deviceKey].(string)
	} else if _, kept, found := strings.Cut(req.Params.RequestState, " "); found {
		choice = kept
	}
	for _, d := range fits.docs {
		if d.ID == choice {
			return devices.ID(choice), nil, nil
		}
	}
	if choice != "" || len(fits.docs) > maxChoices || !canElicit(req.Session) {
		return "", nil, fits
	}
	var enum, names []string
	for _, d := range fits.docs {
		enum, names = append(enum, d.ID), append(names, cleantext.Short(d.Name, maxTitle)+" ("+d.ID+")")
	}
	form, err := json.Marshal(map[string]any{"type": "object", "required": []string{deviceKey}, "properties": map[string]any{
		deviceKey: map[string]any{"type": "string", "title": "Device", "enum": enum, "enumNames": names}}})
	if err != nil {
		return "", nil, fmt.Errorf("encode a form: %w", err)
	}
	return "", &mcp.CallToolResult{InputRequests: mcp.InputRequestMap{deviceKey: &mcp.ElicitParams{Mode: "form",
		Message: "Which device is meant by " + cleantext.Short(text, maxTitle) + "?", RequestedSchema: json.RawMessage(form)}}}, nil
}
