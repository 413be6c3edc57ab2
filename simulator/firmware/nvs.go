package firmware

import (
	"errors"
	"fmt"
)

// Limits of ESP-IDF NVS; every write is wrapped in ESP_ERROR_CHECK (main/settings.cc:40-68), so breaking one aborts.
const (
	nvsKeyLimit    = 15
	nvsStringLimit = 4000 // with the terminating NUL
)

var errNVS = errors.New("NVS refuses, the device aborts")

type nvsEntry struct {
	space, key string
	isString   bool
	text       string
	number     int32
}

// nvs is the device's flash settings. It survives reboots. Not safe for concurrent use.
type nvs struct{ entries []nvsEntry }

func (n *nvs) find(space, key string) *nvsEntry {
	for i := range n.entries {
		if n.entries[i].space == space && n.entries[i].key == key {
			return &n.entries[i]
		}
	}
	return nil
}

// text is Settings::GetString: a missing key and a number both read as "".
func (n *nvs) text(space, key string) string {
	if e := n.find(space, key); e != nil && e.isString {
		return e.text
	}
	return ""
}

// number is Settings::GetInt: a missing key and a string both read as 0.
func (n *nvs) number(space, key string) int32 {
	if e := n.find(space, key); e != nil && !e.isString {
		return e.number
	}
	return 0
}

func (n *nvs) slot(space, key string) (*nvsEntry, error) {
	if len(key) > nvsKeyLimit {
		return nil, fmt.Errorf("%w: key %q of section %q has %d characters, limit %d", errNVS, key, space, len(key), nvsKeyLimit)
	}
	if e := n.find(space, key); e != nil {
		return e, nil
	}
	n.entries = append(n.entries, nvsEntry{space: space, key: key})
	return &n.entries[len(n.entries)-1], nil
}

// setText writes only what differs from the stored value, as the OTA code does.
func (n *nvs) setText(space, key, s string) error {
	if n.text(space, key) == s {
		return nil
	}
	if len(s)+1 > nvsStringLimit {
		return fmt.Errorf("%w: value of %q in section %q has %d bytes, limit %d", errNVS, key, space, len(s), nvsStringLimit-1)
	}
	e, err := n.slot(space, key)
	if err != nil {
		return err
	}
	e.isString, e.text, e.number = true, s, 0
	return nil
}

// setNumber is setText for numbers.
func (n *nvs) setNumber(space, key string, v int32) error {
	if n.number(space, key) == v {
		return nil
	}
	e, err := n.slot(space, key)
	if err != nil {
		return err
	}
	e.isString, e.text, e.number = false, "", v
	return nil
}

// store merges one section of the OTA answer: strings and numbers are kept, other types skipped, omitted keys stay.
func (n *nvs) store(space string, section value) error {
	var fault error
	section.each(func(key string, item value) {
		switch {
		case fault != nil:
		case item.is(jsonString):
			fault = n.setText(space, key, item.string())
		case item.is(jsonNumber):
			fault = n.setNumber(space, key, item.int32())
		}
	})
	return fault
}
