package store

import (
	"encoding/base64"
	"encoding/json"

	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

// Encodings of catalogs.tools.
const (
	encodingText   = "text"
	encodingBase64 = "base64"
)

// encodeTools makes text of a tool list without losing a byte.
func encodeTools(tools json.RawMessage) (text, encoding string) {
	if s := string(tools); database.IsText(s) {
		return s, encodingText
	}
	return base64.StdEncoding.EncodeToString(tools), encodingBase64
}

func decodeTools(text, encoding string) (json.RawMessage, error) {
	if encoding == encodingBase64 {
		return base64.StdEncoding.DecodeString(text)
	}
	return json.RawMessage(text), nil
}

// before orders the pairs that fence presence.
func before(a, b *devices.Presence) bool {
	return a.Epoch < b.Epoch || a.Epoch == b.Epoch && a.Seq < b.Seq
}
