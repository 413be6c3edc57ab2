package devices

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"fleetd/internal/selector"
)

// Sort is the order of a list. Devices of which it says nothing are left out: the
// last two are of those that are offline.
type Sort string

// Orders, all of them ascending. Devices with the same value come in order of
// their ids.
const (
	SortID           Sort = "id"
	SortName         Sort = "name" // without regard to case
	SortLastSeen     Sort = "last_seen"
	SortOfflineSince Sort = "offline_since" // those that never connected come first
)

// ListQuery selects the devices of a list.
type ListQuery struct {
	Select selector.Selector
	Text   string // part of id, name or board, without regard to case
	Sort   Sort   // empty: SortID
	After  string // Next of the page before; empty: from the beginning
	Limit  int    // 1 to 1000
	// Members leaves out devices that wait and never were members: a key that depends
	// on labels, which they have none of, must not see them.
	Members bool
}

// Page is one page of a list. It may have fewer rows than asked for, or none, and
// others may follow nevertheless: the work for one page is bounded.
type Page struct {
	Rows []Row
	Next string // for ListQuery.After; empty: the list ends here
}

// Cursor is a place in a list: after this device, with this value of what the list
// is sorted by.
type Cursor struct {
	Sort   Sort   `json:"s,omitempty"`
	Text   string `json:"t,omitempty"` // of SortName
	Number int64  `json:"n,omitempty"` // of SortLastSeen and SortOfflineSince, microseconds
	ID     ID     `json:"i"`
}

// Compare orders places as lists do.
func (c Cursor) Compare(b Cursor) int {
	return cmp.Or(strings.Compare(c.Text, b.Text), cmp.Compare(c.Number, b.Number), strings.Compare(string(c.ID), string(b.ID)))
}

// HasText tells whether a text in lower case is part of the device's id, name or
// board: it is the search of lists.
func (d *Device) HasText(text string) bool {
	return strings.Contains(string(d.ID), text) || strings.Contains(strings.ToLower(d.Name), text) || strings.Contains(strings.ToLower(d.Board), text)
}

// String is the cursor as Page.Next and ListQuery.After have it.
func (c Cursor) String() string {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and a number can be encoded
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

// ParseCursor reads a cursor of a list in this order, or fails with ErrCursor.
// Empty text is the beginning.
func ParseCursor(text string, sort Sort) (c Cursor, err error) {
	if sort == "" {
		sort = SortID
	}
	if text == "" {
		return Cursor{Sort: sort, Number: math.MinInt64}, nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil || c.Sort != sort || c.ID == "" || !utf8.ValidString(string(c.ID)+c.Text) || strings.ContainsRune(string(c.ID)+c.Text, 0) {
		return Cursor{}, ErrCursor
	}
	return c, nil
}

// ErrCursor is returned for a ListQuery.After that is not a Page.Next of a list in
// the same order.
var ErrCursor = errors.New("unknown cursor; pass next_cursor from the previous page")

// Counted is a value with the number of devices that have it.
type Counted struct {
	Value string `json:"value"`
	N     int64  `json:"n"`
}

// Dimension counts devices by one of their values: those that most devices have,
// the most frequent first, and how many devices have another.
type Dimension struct {
	Top   []Counted `json:"top"`
	Other int64     `json:"other"`
}

// Counts are the numbers of devices by their values: `state` (online, offline, and
// revoked, which is counted beside one of these), `offline_reason` of those that
// are offline, `transport` and `node` of those that are online, `board`,
// `firmware`, `mcp_state`.
type Counts struct {
	Total      int64                `json:"total"`
	Dimensions map[string]Dimension `json:"dimensions"`
	AsOf       time.Time            `json:"as_of"`
}

// CatalogCount is a tool list with the number of devices that had it last.
type CatalogCount struct {
	Catalog Hash
	N       int64
}
