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

// Sort is the order of a list. The last two lists contain only devices that are
// offline.
type Sort string

// Orders, all ascending. Devices with equal values are in order of their ids.
const (
	SortID           Sort = "id"
	SortName         Sort = "name" // ignoring case
	SortLastSeen     Sort = "last_seen"
	SortOfflineSince Sort = "offline_since" // devices that never connected come first
)

// ListQuery is the query of one page of a list.
type ListQuery struct {
	Select selector.Selector
	Text   string // part of id, name or board, ignoring case
	Sort   Sort   // empty: SortID
	After  string // Next of the previous page; empty: start of the list
	Limit  int    // 1 to 1000
	// Members excludes pending devices that were never members: keys that depend on labels
	// must not see them, since they have none.
	Members bool
}

// Page is one page of a list. It may have fewer rows than requested, or none, although
// more follow: the work for one page is limited.
type Page struct {
	Rows []Row
	Next string // for ListQuery.After; empty: end of the list
}

// Cursor is a position in a list: after the device with this id and this value of the
// sort field.
type Cursor struct {
	Sort   Sort   `json:"s,omitempty"`
	Text   string `json:"t,omitempty"` // of SortName
	Number int64  `json:"n,omitempty"` // of SortLastSeen and SortOfflineSince, microseconds
	ID     ID     `json:"i"`
}

// Compare orders cursors as lists are ordered.
func (c Cursor) Compare(b Cursor) int {
	return cmp.Or(strings.Compare(c.Text, b.Text), cmp.Compare(c.Number, b.Number), strings.Compare(string(c.ID), string(b.ID)))
}

// HasText reports whether a text in lower case is part of the device's id, name or
// board, as the search of lists does.
func (d *Device) HasText(text string) bool {
	return strings.Contains(string(d.ID), text) || strings.Contains(strings.ToLower(d.Name), text) || strings.Contains(strings.ToLower(d.Board), text)
}

// String returns the cursor as in Page.Next and ListQuery.After.
func (c Cursor) String() string {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // cannot fail for strings and a number
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

// ParseCursor parses a cursor of a list in this order, or returns ErrCursor. Empty text
// is the start of the list.
func ParseCursor(text string, sort Sort) (c Cursor, err error) {
	sort = cmp.Or(sort, SortID)
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

// ErrCursor is returned if ListQuery.After is not a Page.Next of a list in the same
// order.
var ErrCursor = errors.New("this cursor is not of a page of this list with these filters; begin again without cursor")

// ValueCount is a value with the number of devices that have it.
type ValueCount struct {
	Value string `json:"value"`
	N     int64  `json:"n"`
}

// Dimension counts devices by one of their values: the most frequent values, and the
// number of devices with other values.
type Dimension struct {
	Top   []ValueCount `json:"top"`
	Other int64        `json:"other"`
}

// Counts are the numbers of devices by their values: `state` (online, offline, and
// revoked, which is counted in addition), `offline_reason` of offline devices,
// `transport` and `node` of online devices, `board`, `firmware`, `mcp_state`.
type Counts struct {
	Total      int64                `json:"total"`
	Dimensions map[string]Dimension `json:"dimensions"`
	AsOf       time.Time            `json:"as_of"`
}

// CatalogCount is a tool list with the number of devices whose latest list it is.
type CatalogCount struct {
	Catalog Hash
	N       int64
}
