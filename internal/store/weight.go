package store

import (
	"encoding/json"
	"iter"

	"fleetd/internal/devices"
)

// Limits in bytes. A limit of rows alone is not sufficient: a tool list may have a megabyte, and
// a device may send a new one each time.
const (
	// MaxQueueBytes is how many bytes of history entries and tool lists may be queued or in
	// flight; more are dropped and counted.
	MaxQueueBytes = 64 << 20
	// GroupBytes is about how many bytes are committed together: a transaction must end long
	// before groupTimeout, since others wait for it.
	GroupBytes = 8 << 20
	// rowBytes estimates the memory of a row beside its text.
	rowBytes = 512
)

// weight counts the bytes of history entries and tool lists. A list counts once, however many
// rows have it.
type weight struct {
	bytes int
	lists map[devices.Hash]*sharedList
}

// sharedList is a list with the number of rows that have it.
type sharedList struct {
	tools json.RawMessage
	rows  int
}

// cost returns what add would add.
func (w *weight) cost(own int, h devices.Hash, tools json.RawMessage) int {
	if w.lists[h] != nil {
		return own
	}
	return own + len(tools)
}

// add counts a row and its list, if it has one, and returns the copy of the list that all rows
// share.
func (w *weight) add(own int, h devices.Hash, tools json.RawMessage) json.RawMessage {
	w.bytes += own
	if tools == nil {
		return nil
	}
	list := w.lists[h]
	if list == nil {
		if w.lists == nil {
			w.lists = map[devices.Hash]*sharedList{}
		}
		list = &sharedList{tools: tools}
		w.lists[h] = list
		w.bytes += len(tools)
	}
	list.rows++
	return list.tools
}

// remove undoes add.
func (w *weight) remove(own int, h devices.Hash, tools json.RawMessage) {
	w.bytes -= own
	list := w.lists[h]
	if tools == nil || list == nil {
		return
	}
	if list.rows--; list.rows == 0 {
		w.bytes -= len(list.tools)
		delete(w.lists, h)
	}
}

// bytes returns the size of the row without its list.
func (r *historyRow) bytes() int { return rowBytes + len(r.Firmware) + len(r.ELF) }

// weighed returns the history entries and lists of a group with their sizes.
func (g *group) weighed() iter.Seq2[int, devices.CatalogText] {
	return func(yield func(int, devices.CatalogText) bool) {
		for i := range g.history {
			row := &g.history[i]
			if !yield(row.bytes(), devices.CatalogText{Hash: row.Catalog, Tools: row.text.Tools}) {
				return
			}
		}
		for _, list := range g.lists {
			if !yield(rowBytes, list) {
				return
			}
		}
	}
}
