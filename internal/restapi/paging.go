package restapi

import (
	"context"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// Bounds of a page.
const (
	MaxLimit   = 1000    // items
	pageBytes  = 1 << 20 // of the items as JSON; one item alone may be larger
	pieceLimit = 100     // items that are in memory before their size is known
)

// Page are the parameters of a list.
type Page struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"A page has at most so many items. It also ends at 1 MiB."`
	Cursor string `query:"cursor" doc:"It is the next_cursor of the page before, and belongs to the filters and the order of that page."`
}

// paging is the request for one page of a list.
type paging struct {
	s     *Server
	list  string // what the cursor is bound to
	limit int
	after string    // the place after which the page begins; empty: at the beginning
	begun time.Time // the time of the first page, from which relative times count
}

// page opens the cursor of a request.
func (s *Server) page(ctx context.Context, in Page) (*paging, error) {
	p := &paging{s: s, list: listOf(ctx), limit: in.Limit, begun: clock.Now().Truncate(time.Microsecond)}
	if in.Cursor == "" {
		return p, nil
	}
	text, err := s.opt.Mint.Place(p.list, in.Cursor, p.begun)
	if err != nil {
		return nil, errCursor
	}
	begun, after, _ := strings.Cut(text, " ")
	micros, err := strconv.ParseInt(begun, 10, 64)
	if err != nil {
		return nil, errCursor
	}
	p.begun, p.after = time.UnixMicro(micros).UTC(), after
	return p, nil
}

var errCursor = badRequest(devices.ErrCursor.Error())

// cursor seals the place at which a page ended; empty: the list is at its end.
func (p *paging) cursor(place string) string {
	if place == "" {
		return ""
	}
	return p.s.opt.Mint.Cursor(p.list, strconv.FormatInt(p.begun.UnixMicro(), 10)+" "+place, clock.Now())
}

// time reads a parameter that is a time, or a duration before the first page.
func (p *paging) time(name, text string) (time.Time, error) { return parseMoment(name, text, p.begun) }

// listName is what the cursor of a list is bound to: the path, and all parameters but limit and cursor.
func listName(u url.URL) string {
	query := u.Query()
	query.Del("limit")
	query.Del("cursor")
	return u.Path + "?" + query.Encode()
}

// fetcher returns up to n items after a place, and the place of the last one that was looked at; empty at the end of the
// list. Fewer than n items with a place mean that the work for them was bounded.
type fetcher[T any] func(after string, n int) (items []T, next string, err error)

// fillPage fills a page, piece by piece, so that neither the page nor what is read for it exceeds pageBytes by more than a
// piece. A page may be shorter than the limit.
func fillPage[T any](p *paging, piece int, fetch fetcher[T]) (api.List[T], error) {
	page := api.List[T]{Items: []T{}}
	after, bytes := p.after, 0
	for len(page.Items) < p.limit {
		n := min(piece, p.limit-len(page.Items))
		items, next, err := fetch(after, n)
		if err != nil {
			return page, err
		}
		size, err := sizeOf(items)
		if err != nil {
			return page, err
		}
		if bytes+size > pageBytes && len(page.Items) > 0 {
			break
		}
		if size > pageBytes && len(items) > 1 {
			piece = (len(items) + 1) / 2
			continue
		}
		page.Items, bytes = append(page.Items, items...), bytes+size
		if after = next; next == "" || len(items) < n {
			break
		}
	}
	page.NextCursor = p.cursor(after)
	return page, nil
}

// sizeOf returns the size of items as JSON, in bytes.
func sizeOf[T any](items []T) (size int, err error) {
	for i := range items {
		text, err := json.Marshal(&items[i])
		if err != nil {
			return 0, err
		}
		size += len(text) + 1
	}
	return size, nil
}

// inMemory is the fetcher of a list in memory that is sorted by the place of its items.
func inMemory[T any](items []T, place func(*T) string) fetcher[T] {
	return func(after string, n int) ([]T, string, error) {
		var out []T
		for i := range items {
			switch {
			case place(&items[i]) <= after:
			case len(out) == n:
				return out, place(&out[n-1]), nil
			default:
				out = append(out, items[i])
			}
		}
		return out, "", nil
	}
}

// numberPlace writes a number as a place; numberOf reads it, 0 for the beginning of the list.
func numberPlace(n int64) string { return strconv.FormatInt(n, 10) }

func numberOf(place string) (int64, error) {
	if place == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(place, 10, 64)
	if err != nil {
		return 0, errCursor
	}
	return n, nil
}
