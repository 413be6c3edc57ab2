// Package fleet is the core of fleetd: it combines the registry, sessions, admission
// and requests of package devices into one Service. Front ends (wsdevice,
// mqttdevice) feed connections in; restapi, mcpserver and cluster call it. All I/O
// goes through the interfaces in ports.go and those of the parts.
//
// The package does not depend on SQL, NATS, WebSocket or HTTP.
package fleet
