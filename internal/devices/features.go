package devices

// Features is what is known of a device's MCP server. The device reports it in its
// hello, which over MQTT may arrive long after the connection, or never.
type Features uint8

// Features.
const (
	FeaturesUnknown Features = iota
	FeaturesMCP
	FeaturesNone
)

// FeaturesOf reads features.mcp of a hello.
func FeaturesOf(mcp bool) Features {
	if mcp {
		return FeaturesMCP
	}
	return FeaturesNone
}
