//! Interned names of labels, walks and nodes.

use std::sync::RwLock;

/// A table of names; the id of a name is its place in it.
#[derive(Debug, Default)]
pub struct Names(RwLock<Vec<String>>);

impl Names {
    /// A table that starts with these.
    pub fn with<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        Self(RwLock::new(names.into_iter().map(str::to_owned).collect()))
    }

    /// The id of `name`, which is added if it is new.
    pub fn intern(&self, name: &str) -> u32 {
        if let Some(id) = self.find(name) {
            return id;
        }
        let mut names = self.0.write().unwrap_or_else(|e| e.into_inner());
        // Somebody may have added it in between.
        let at = names.iter().position(|n| n == name).unwrap_or_else(|| {
            names.push(name.to_owned());
            names.len() - 1
        });
        at as u32
    }

    /// The id of `name`, where it has one.
    pub fn find(&self, name: &str) -> Option<u32> {
        self.read().iter().position(|n| n == name).map(|at| at as u32)
    }

    /// How many names there are.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.read().len()
    }

    /// The name with this id; a made-up one when there is none.
    pub fn name(&self, id: u32) -> String {
        self.read().get(id as usize).cloned().unwrap_or_else(|| format!("#{id}"))
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Vec<String>> {
        self.0.read().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_id() {
        let names = Names::with(["main"]);
        assert_eq!((names.intern("context"), names.intern("main")), (1, 0));
        assert_eq!((names.intern("context"), names.name(1).as_str()), (1, "context"));
        assert_eq!(names.name(9), "#9");
    }
}
