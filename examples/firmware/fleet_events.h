// Notifications from a xiaozhi-esp32 board to fleetd.
//
// Stock firmware answers MCP requests and never says anything by itself. With these two files in the directory of a
// board it can: a notification travels as MCP does, over the connection the device has anyway, and arrives on NATS as
//
//     fleetd.v1.devices.<device without colons>.notifications.<name>
//
// SPDX-License-Identifier: Apache-2.0

#ifndef FLEET_EVENTS_H_
#define FLEET_EVENTS_H_

#include <cJSON.h>

#include <string>

namespace fleet {

// Sends {"jsonrpc":"2.0","method":"notifications/<name>","params":{...}}.
//
// name: words of [A-Za-z0-9_-], separated by '/'; each becomes one token of the NATS subject.
// params: a JSON object, or nullptr for none. Notify takes it over and deletes it.
//
// May be called from any task: the message is built here and written later by the main loop. Not from an interrupt
// handler, since it allocates. Nothing is reported back: without an open connection the message is lost.
void Notify(const std::string& name, cJSON* params = nullptr);

// Watches a reading and calls for a notification when it crosses a threshold, once per crossing: it fires at `high`
// and can fire again only after the reading was at or below `low`. Without that gap a reading that trembles around
// one threshold would send a notification with every sample.
//
// Not safe for use by several tasks at once: give each task its own.
class Threshold {
public:
    // `low` must be below `high`.
    Threshold(double low, double high) : low_(low), high_(high) {}

    // Returns true if this reading is the one to report. A reading that is not a number changes nothing.
    bool Crossed(double reading);

private:
    double low_;
    double high_;
    bool above_ = false;
};

}  // namespace fleet

#endif  // FLEET_EVENTS_H_
