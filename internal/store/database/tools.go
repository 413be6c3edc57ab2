package database

import (
	"encoding/base64"
	"encoding/json"
)

// Encodings of catalogs.tools.
const (
	encodingText   = "text"
	encodingBase64 = "base64"
)

// EncodeTools makes text of a tool list without losing a byte.
func EncodeTools(tools json.RawMessage) (text, encoding string) {
	if s := string(tools); IsText(s) {
		return s, encodingText
	}
	return base64.StdEncoding.EncodeToString(tools), encodingBase64
}

// DecodeTools is the opposite of EncodeTools.
func DecodeTools(text, encoding string) (json.RawMessage, error) {
	if encoding == encodingBase64 {
		return base64.StdEncoding.DecodeString(text)
	}
	return json.RawMessage(text), nil
}
