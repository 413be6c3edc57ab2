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

// EncodeTools encodes a tool list as text without loss.
func EncodeTools(tools json.RawMessage) (text, encoding string) {
	if s := string(tools); IsText(s) {
		return s, encodingText
	}
	return base64.StdEncoding.EncodeToString(tools), encodingBase64
}

// DecodeTools is the inverse of EncodeTools.
func DecodeTools(text, encoding string) (json.RawMessage, error) {
	if encoding == encodingBase64 {
		return base64.StdEncoding.DecodeString(text)
	}
	return json.RawMessage(text), nil
}
