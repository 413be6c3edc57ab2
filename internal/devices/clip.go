package devices

import "strings"

// Clip bounds what a device may say of itself. What is cut off is let go.
func Clip(text string) string {
	if len(text) <= maxSaid {
		return text
	}
	return strings.Clone(strings.ToValidUTF8(text[:maxSaid], ""))
}

const maxSaid = 128
