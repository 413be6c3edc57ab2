// Package fleet is the core of fleetd: who the devices are, which of them
// hold a session on this node, what their tools are, and how a call reaches
// them. Front ends (wsdevice) feed connections in, use cases (restapi,
// cluster) come from the other side, and everything that leaves the process
// goes through the small interfaces declared in ports.go.
//
// Nothing here knows SQL, NATS, WebSocket or HTTP.
package fleet
